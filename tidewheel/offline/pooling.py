"""Embeddings, classes and scores of texts, by encoders. Used on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from tidewheel.engine.encoders.encoder import Encoder, ScorePlan
from tidewheel.engine.encoders.engine import EncoderEngine, Results
from tidewheel.engine.encoders.tasks import Task
from tidewheel.engine.encoders.tokenization import EncoderInput
from tidewheel.engine.errors import InvalidRequestError
from tidewheel.server.encoders import check_input, truncation

from .errors import engine_errors
from .outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from .prompts import from_dict

Text: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or a dict as a prompt."""

_INPUTS_AT_ONCE = 256  # inputs after which progress is shown
_WHAT: Mapping[Task, str] = {
    "embed": "embeddings",
    "token_embed": "embeddings of tokens",
    "classify": "classes",
    "token_classify": "classes of tokens",
    "sparse": "sparse vectors",
}


class Pooler:
    """Runs the encoders of an LLM. `done` is called with numbers of inputs that are finished."""

    def __init__(self, engine: EncoderEngine) -> None:
        self._engine = engine

    async def embed(
        self, texts: Sequence[Text], done: Callable[[int], object], **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """As `encode` with the task embed, with vectors that are lists."""
        return [
            EmbeddingRequestOutput(one.request_id, EmbeddingOutput(one.outputs.data.tolist()), one.prompt_token_ids)
            for one in await self.encode(texts, done, **{**options, "pooling_task": "embed"})
        ]

    async def classify(
        self, texts: Sequence[Text], done: Callable[[int], object], **options: Any
    ) -> list[ClassificationRequestOutput]:
        """As `encode` with the task classify, with probabilities that are lists."""
        return [
            ClassificationRequestOutput(
                one.request_id, ClassificationOutput(one.outputs.data.tolist()), one.prompt_token_ids
            )
            for one in await self.encode(texts, done, **{**options, "pooling_task": "classify"})
        ]

    async def encode(
        self,
        texts: Sequence[Text],
        done: Callable[[int], object],
        *,
        pooling_task: Task | None = None,
        model: str | None = None,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
        use_activation: bool | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What a task makes of texts, or of token ids, as arrays. Raises InvalidRequestError.

        Without a task it is the first model's own. `use_activation` says whether vectors get the length 1, and logits
        become probabilities; None: as the model does it.
        """
        what = "this" if pooling_task is None else _WHAT[pooling_task]
        encoder = self._find(
            model,
            what,
            lambda one: pooling_task is None or pooling_task in one.tasks,
            lambda one: pooling_task in (None, one.task),
        )
        task = pooling_task or encoder.task
        encoder.check_task(task, dimensions=dimensions, use_activation=use_activation)
        with engine_errors():
            limit = truncation(encoder, truncate_prompt_tokens)

            def encode(given: Text) -> EncoderInput:
                text = from_dict(given)[0] if isinstance(given, Mapping) else given
                if isinstance(text, str):
                    return encoder.encode(text, truncate_to=limit)
                return encoder.tokens(text[:limit])

            inputs = await self._checked(encoder, texts, encode)
        if not inputs:
            return []
        results = await self._run(encoder, task, inputs, done)
        answers = encoder.finished(task, results, dimensions=dimensions, use_activation=use_activation)
        return [
            PoolingRequestOutput(str(i), PoolingOutput(answer), one.token_ids)
            for i, (answer, one) in enumerate(zip(answers, inputs, strict=True))
        ]

    async def score(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        done: Callable[[int], object],
        *,
        model: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each document goes with the query at its place, or with the only one. Raises InvalidRequestError."""
        if not documents or len(queries) not in (1, len(documents)):
            raise InvalidRequestError(
                f"data_1 must have one text, or as many as data_2, got {len(queries)} and {len(documents)}", "data_1"
            )
        encoder = self._find(
            model, "scores", lambda one: one.is_cross_encoder or not one.labels, lambda one: one.is_cross_encoder
        )
        names = ("data_1", "data_2")
        with engine_errors():
            limit = truncation(encoder, truncate_prompt_tokens)

            def planned() -> ScorePlan:
                plan = encoder.plan_scores(queries, documents, truncate_to=limit)
                for one, (side, i) in zip(plan.inputs, plan.sources, strict=True):
                    check_input(encoder, one, f"{names[side]}[{i}]")
                return plan

            plan = await asyncio.to_thread(planned)
        scores = plan.scores(await self._run(encoder, plan.task, plan.inputs, done)).tolist()
        read = {i: one.token_ids for one, (side, i) in zip(plan.inputs, plan.sources, strict=True) if side == 1}
        return [ScoringRequestOutput(str(i), ScoringOutput(score), read[i]) for i, score in enumerate(scores)]

    async def _checked(
        self, encoder: Encoder, texts: Sequence[Text], encode: Callable[[Text], EncoderInput]
    ) -> list[EncoderInput]:
        def encoded() -> list[EncoderInput]:
            inputs = [encode(text) for text in texts]
            for i, one in enumerate(inputs):
                check_input(encoder, one, f"prompts[{i}]")
            return inputs

        return await asyncio.to_thread(encoded)

    async def _run(
        self, encoder: Encoder, task: Task, inputs: Sequence[EncoderInput], done: Callable[[int], object]
    ) -> Results:
        parts = [inputs[start : start + _INPUTS_AT_ONCE] for start in range(0, len(inputs), _INPUTS_AT_ONCE)]
        futures = [self._engine.submit(encoder, task, part) for part in parts]
        try:
            for part, future in zip(parts, futures, strict=True):
                await future
                done(len(part))
        finally:
            for future in futures:
                future.cancel()
        return [result for future in futures for result in future.result()]

    def _find(
        self, name: str | None, what: str, fits: Callable[[Encoder], bool], is_best: Callable[[Encoder], bool]
    ) -> Encoder:
        """The encoder of a name if it fits. Without a name the first of the best, or else the first that fits."""
        encoders = self._engine.encoders
        named = [one for one in encoders.values() if name in (None, one.name)]
        if fitting := sorted(filter(fits, named), key=lambda one: not is_best(one)):
            return fitting[0]
        problem = f"there is no model for {what}{'' if name is None else f' that is called {name}'}"
        if not encoders:
            raise InvalidRequestError(
                f"{problem}: make the LLM with embedding_model=, or with an embedding model and runner='pooling'",
                "model",
            )
        there = "; ".join(f"{one.name} has {_methods(one)}" for one in encoders.values())
        raise InvalidRequestError(f"{problem}: {there}. Other models are named with embedding_model=", "model")


def _methods(encoder: Encoder) -> str:
    """What a model can be asked for, as calls of an LLM."""
    calls = [f"{task}()" for task in ("embed", "classify") if task in encoder.tasks]
    calls += [f"encode(pooling_task={task!r})" for task in sorted(encoder.tasks - {"embed", "classify"})]
    return ", ".join(calls + ["score()"] * (encoder.is_cross_encoder or not encoder.labels))
