"""Embedder: an encoder that turns a text into a vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequestError, ModelError, quoted
from .description import EncoderDescription
from .encoder import Encoder, ScorePlan
from .graph import POOLED_OUTPUT, TOKEN_OUTPUTS, TOKEN_VECTORS, TOKEN_WEIGHTS, EncoderGraph
from .pooling import Floats, cosines, looks_at_ends, normalized, places_read, pool
from .sparse_vectors import strongest
from .tasks import Task
from .tokenization import EncoderInput, EncoderTokenizer, special_texts

_QUERY_PROMPTS = ("query", "retrieval.query")
_DOCUMENT_PROMPTS = ("document", "passage", "corpus", "retrieval.passage")
_UNWEIGHTED = ("bos_token", "cls_token", "eos_token", "pad_token", "sep_token", "unk_token")


class Embedder(Encoder):
    """A model that turns a text into a vector."""

    def __init__(
        self, name: str, source: str, description: EncoderDescription, tokenizer: EncoderTokenizer, graph: EncoderGraph
    ) -> None:
        self.prompts = description.prompts
        self.default_prompt_name = description.default_prompt_name
        self.pooling = description.pooling
        self._pools_prompt = description.pools_prompt
        self._normalizes = description.normalize
        self._dimensions = description.dimensions
        self._matryoshka = description.matryoshka
        self._unweighted: list[int] = []  # tokens without a weight in sparse vectors, as BGE-M3's own code has it
        if TOKEN_WEIGHTS in graph.outputs:
            named = special_texts(description.tokenizer_folder)
            ids = [tokenizer.token_id(named.get(role)) for role in _UNWEIGHTED]
            self._unweighted = [i for i in ids if i is not None]
        super().__init__(name, source, description, tokenizer, graph)
        self.info = {**self.info, "width": str(self._dimensions or self.width)}
        if description.is_pooled_as_asked and self._outputs.get("embed") == POOLED_OUTPUT:
            raise ModelError(
                f"{graph.path} pools the tokens itself: leave pooling_type and use_activation out of --pooler-config"
            )
        try:
            self.check_task(self.task, dimensions=self._dimensions, use_activation=description.normalize)
        except InvalidRequestError as error:
            raise ModelError(f"--pooler-config: {error}") from error

    def encode(
        self,
        text: str,
        *,
        prompt_name: str | None = None,
        add_special_tokens: bool = True,
        truncate_to: int | None = None,
    ) -> EncoderInput:
        """The input for a text after one of the model's prompts, by default after its default prompt.

        Raises InvalidRequestError if the model has no such prompt.
        """
        name = self._prompt_name(prompt_name)
        prompt = "" if name is None else self.prompts[name]
        item = self.tokenizer.encode(
            prompt + text, add_special_tokens=add_special_tokens, truncate_to=truncate_to, at_most=self.max_length
        )
        if item.is_too_long:
            return item
        skipped = self.tokenizer.prompt_length(prompt) if prompt and not self._pools_prompt else 0
        return EncoderInput(item.token_ids, item.type_ids, skipped, adapter=self._adapter(name))

    def tokens(self, token_ids: Sequence[int], *, prompt_name: str | None = None) -> EncoderInput:
        """See Encoder. A prompt changes no tokens, but it may have an adapter."""
        return EncoderInput(token_ids, adapter=self._adapter(self._prompt_name(prompt_name)))

    def check_task(
        self, task: Task, *, dimensions: int | None = None, use_activation: bool | None = None, param: str = "task"
    ) -> None:
        """See Encoder. Also for too many dimensions, or if normalizing cannot be turned off."""
        super().check_task(task, dimensions=dimensions if task == "sparse" else None, param=param)
        width = self.widths[task]
        if dimensions is not None and not 1 <= dimensions <= width:
            raise InvalidRequestError(
                f"dimensions must be between 1 and {width}, the number that {self.name} has, got {dimensions}",
                "dimensions",
            )
        if dimensions not in (None, width):
            self._check_cut(dimensions)
        if use_activation is False and self._normalizes and self._outputs[task] == POOLED_OUTPUT:
            raise InvalidRequestError(
                f"normalize must not be false, because the graph of {self.name} normalizes its vectors", "normalize"
            )

    def _check_cut(self, dimensions: int) -> None:
        """Raises InvalidRequestError for a number that the model's config rules out, as vLLM does."""
        if self._matryoshka is False:
            raise InvalidRequestError(
                f"dimensions must be left out: the config of {self.name} says that its vectors cannot be cut",
                "dimensions",
            )
        if isinstance(self._matryoshka, tuple) and dimensions not in self._matryoshka:
            sizes = ", ".join(map(str, self._matryoshka))
            raise InvalidRequestError(
                f"dimensions must be one of {sizes}, which {self.name} was trained for, got {dimensions}", "dimensions"
            )

    def finished(
        self,
        task: Task,
        results: Sequence[Floats],
        *,
        dimensions: int | None = None,
        use_activation: bool | None = None,
    ) -> list[Floats]:
        """See Encoder."""
        if task == "sparse":
            return [*results]
        if task == "token_embed":
            return [self.vectors(rows, dimensions=dimensions, normalize=use_activation) for rows in results]
        return [*self.vectors(results, dimensions=dimensions, normalize=use_activation)]

    def vectors(
        self, rows: Floats | Sequence[Floats], *, dimensions: int | None = None, normalize: bool | None = None
    ) -> Floats:
        """The embeddings of N results of `embed`, or of the N tokens of one result of `token_embed`: [N, dimensions].

        If `normalize` is not given, the model decides. `dimensions` keeps only the first components (Matryoshka, arXiv
        2205.13147).
        """
        vectors: Floats = np.asarray(rows)[:, : dimensions or self._dimensions]
        return normalized(vectors) if normalize or (normalize is None and self._normalizes) else vectors

    def plan_scores(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        truncate_to: int | None = None,
        use_activation: bool | None = None,
    ) -> ScorePlan:
        """See Encoder. A score is the cosine of two vectors. Each text follows its prompt, if the model has one."""
        size = self._dimensions
        return self._plan(
            "embed", queries, documents, truncate_to, lambda q, d: cosines(np.stack(q)[:, :size], np.stack(d)[:, :size])
        )

    def _plan(
        self,
        task: Task,
        queries: Sequence[str],
        documents: Sequence[str],
        truncate_to: int | None,
        scores: Callable[[Sequence[Floats], Sequence[Floats]], NDArray[np.float64]],
    ) -> ScorePlan:
        """A plan with `scores` of results of queries, or of one for all, and of documents, each behind its prompt."""
        query_prompt, document_prompt = self._prompt_among(_QUERY_PROMPTS), self._prompt_among(_DOCUMENT_PROMPTS)
        inputs = [self.encode(text, prompt_name=query_prompt, truncate_to=truncate_to) for text in queries]
        inputs += [self.encode(text, prompt_name=document_prompt, truncate_to=truncate_to) for text in documents]
        n = len(queries)
        sources = [*((0, i) for i in range(n)), *((1, i) for i in range(len(documents)))]
        return ScorePlan(task, inputs, sources, lambda results: scores(results[:n], results[n:]))

    def _prompt_name(self, given: str | None) -> str | None:
        name = self.default_prompt_name if given is None else given
        if name is not None and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InvalidRequestError(f"{self.name} has no prompt {quoted(name)}; it has {known}", "prompt_name")
        return name

    def _adapter(self, prompt_name: str | None) -> int:
        adapters = self._graph.adapters
        return adapters.index(prompt_name) if prompt_name in adapters else -1

    def _prompt_among(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self.prompts), None)

    def _choose_outputs(self, description: EncoderDescription) -> Mapping[Task, str]:
        outputs = self._graph.outputs
        tokens = next((name for name in TOKEN_OUTPUTS if name in outputs), None)
        if tokens is not None and not description.foreign_modules:
            own = TOKEN_VECTORS if TOKEN_VECTORS in outputs else tokens
            chosen: dict[Task, str] = {"embed": tokens, "token_embed": own}
            return chosen | {"sparse": TOKEN_WEIGHTS} if TOKEN_WEIGHTS in outputs else chosen
        if POOLED_OUTPUT not in outputs:
            if description.foreign_modules:
                raise ModelError(
                    f"{self.source} has modules that are not supported outside of the graph "
                    f"({', '.join(description.foreign_modules)}), and {self._graph.path} has no output {POOLED_OUTPUT}"
                )
            raise self._missing((*TOKEN_OUTPUTS, POOLED_OUTPUT))
        if not self._pools_prompt and any(self.prompts.values()):
            raise ModelError(
                f"{self.source} leaves its prompts out of pooling, but {POOLED_OUTPUT} of its graph does not"
            )
        found: dict[Task, str] = {"embed": POOLED_OUTPUT}
        return found if tokens is None else {**found, "token_embed": tokens}

    def _read(self, task: Task, inputs: Sequence[EncoderInput]) -> Sequence[Sequence[int]] | None:
        if task != "embed" or self._outputs[task] not in TOKEN_OUTPUTS:
            return None
        if not looks_at_ends(self.pooling):
            return None
        return [places_read(len(item), item.prompt_length, self.pooling) for item in inputs]

    def _results(self, task: Task, values: Sequence[Floats], inputs: Sequence[EncoderInput]) -> list[Floats]:
        if task == "sparse":
            return [
                strongest(item.token_ids, weights[:, 0], self._unweighted)
                for weights, item in zip(values, inputs, strict=True)
            ]
        if self._outputs[task] == TOKEN_VECTORS:  # of BGE-M3, without the first token
            return [vectors[1:] for vectors in values]
        if task == "token_embed" or self._outputs[task] == POOLED_OUTPUT:
            return [*values]
        pooled = [pool(tokens, item.prompt_length, self.pooling) for tokens, item in zip(values, inputs, strict=True)]
        return [*self._graph.after_pooling(np.stack(pooled))]
