"""LLM: a model in this process, for lists of prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, cast

from tidewheel.engine.errors import InvalidRequestError

from .adapters import LoraRequests
from .chat_tokenizer import ChatTokenizer
from .engine_args import EngineArgs
from .llm_engine import LLMEngine
from .model import ModelConfig, OfflineModel
from .not_there import NamesOfVllm
from .options import offline_options
from .outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from .params import BeamSearchParams, SamplingParams
from .pooling import Text
from .pooling_params import PoolingParams, pooling_options
from .progress import UseTqdm, progress
from .prompts import Conversation, PromptType
from .running import RunningModel
from .vllm_calls import take_none_but_vllms


class LLM(NamesOfVllm):
    """A model in this process. Methods may be called from any thread, also from several at once.

    `model` is a folder, a .gguf file or a Hugging Face hub id; None is the embedded demo model. `options` are options
    of `tidewheel serve` by their Python names (`max_model_len=4096`): all for the engine, devices and embedding models,
    and `chat_template` and `generation_config`. If the model is for embeddings, classes or scores, which `runner` and
    `convert` may say too, nothing that generates is loaded.

    As a context manager, or with `shutdown`, it frees its threads and memory. Raises TidewheelError if the model cannot
    be loaded, TypeError for an option that does not exist.
    """

    def __init__(self, model: str | None = None, *, runner: str | None = None, **options: Any) -> None:
        self._running = RunningModel(offline_options(model, runner, options))
        self._ids = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> LLM:
        """An LLM with these arguments, and others. Raises as the constructor does."""
        return cls(**engine_args.given(), **others)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End what runs, and free threads and memory. Calling it twice is allowed."""
        self._running.close()

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """The same model, for requests that are added one by one."""
        return LLMEngine(self._running)

    @property
    def model_config(self) -> ModelConfig:
        """What the loaded model is."""
        return self._model.model_config()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoraRequests = None,
        priority: int | Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """The answers to prompts, in their order.

        A list of integers is one prompt. `prompt_token_ids` is the name for prompts in older versions of vLLM.
        `sampling_params` are for all prompts, or one for each; None: the model's own (see
        `get_default_sampling_params`). `priority` is for all, or one for each; prompts with a lower one run first.
        `lora_request` is the adapter of all prompts, or one for each; None is the model itself. An adapter is loaded
        when it is first named. `of_vllm` are other arguments of vLLM: the log says once why they have no effect.

        Raises InvalidRequestError for a prompt, parameters or an adapter that cannot be served.
        """
        take_none_but_vllms("LLM.generate", of_vllm)
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidRequestError("give either prompts or prompt_token_ids", "prompts")
        wanted = _listed(prompt_token_ids if prompts is None else prompts)
        params = sampling_params or self.get_default_sampling_params()
        return self._answers(wanted, params, "prompt", use_tqdm, priority=priority, lora_request=lora_request)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoraRequests = None,
        *,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """The answers to a conversation, or to several. Answers are what the model wrote, including reasoning and tool
        calls.

        `chat_template` is used instead of the model's own, and `mm_processor_kwargs` instead of settings of its image
        processor; the other arguments are as in `generate`. Raises InvalidRequestError.
        """
        take_none_but_vllms("LLM.chat", of_vllm)
        one = bool(messages) and isinstance(messages[0], dict)
        conversations = [cast(Conversation, messages)] if one else cast("Sequence[Conversation]", messages)
        options = {
            "chat_template": chat_template,
            "add_generation_prompt": None if continue_final_message else add_generation_prompt,
            "continue_final_message": continue_final_message or None,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "mm_processor_kwargs": mm_processor_kwargs or None,
        }
        params = sampling_params or self.get_default_sampling_params()
        return self._answers(
            conversations,
            params,
            "conversation",
            use_tqdm,
            priority=priority,
            chat=options,
            lora_request=lora_request,
        )

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoraRequests = None,
        use_tqdm: UseTqdm = False,
        *,
        priority: int | Sequence[int] | None = None,
        **of_vllm: Any,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of prompts, `beam_width` of each. The other arguments are as in `generate`.

        Raises InvalidRequestError.
        """
        take_none_but_vllms("LLM.beam_search", of_vllm)
        found = self._answers(
            _listed(prompts), params, "prompt", use_tqdm, priority=priority, lora_request=lora_request
        )
        return [_beams(output) for output in found]

    def embed(
        self,
        prompts: Text | Sequence[Text],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        model: str | None = None,
        **of_vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The vectors of texts, or of token ids.

        `truncate_prompt_tokens` -1 cuts texts to what the model takes. `dimensions` is how many numbers of a vector to
        keep. All may be in `pooling_params`. `model` names one of several embedding models. Raises InvalidRequestError.
        """
        take_none_but_vllms("LLM.embed", of_vllm)
        options = pooling_options(
            pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            dimensions=dimensions,
            use_activation=normalize,
            model=model,
            pooling_task="embed",
        )
        texts = _listed(prompts)
        with progress(len(texts), "text", use_tqdm) as done:
            return self._running.run(self._model.pooler.embed(texts, done, **options))

    def encode(
        self,
        prompts: Text | Sequence[Text],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: UseTqdm = True,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        model: str | None = None,
        **of_vllm: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What a task makes of texts, or of token ids, as numpy arrays.

        `pooling_task` is `task` in PoolingParams: embed, token_embed, classify, token_classify or sparse; without one
        it is what the model is for. The rest is as in `embed`. Raises InvalidRequestError.
        """
        take_none_but_vllms("LLM.encode", of_vllm)
        task = PoolingParams(task=pooling_task).given()
        options = pooling_options(pooling_params, truncate_prompt_tokens=truncate_prompt_tokens, model=model, **task)
        texts = _listed(prompts)
        with progress(len(texts), "text", use_tqdm) as done:
            return self._running.run(self._model.pooler.encode(texts, done, **options))

    def classify(
        self,
        prompts: Text | Sequence[Text],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        model: str | None = None,
        **of_vllm: Any,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of texts' labels. The arguments are as in `encode`. Raises InvalidRequestError."""
        take_none_but_vllms("LLM.classify", of_vllm)
        options = pooling_options(
            pooling_params, truncate_prompt_tokens=truncate_prompt_tokens, model=model, pooling_task="classify"
        )
        texts = _listed(prompts)
        with progress(len(texts), "text", use_tqdm) as done:
            return self._running.run(self._model.pooler.classify(texts, done, **options))

    def reward(
        self,
        prompts: Text | Sequence[Text],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        model: str | None = None,
        **of_vllm: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What a reward model says of each token: `encode` with the task token_classify, as in vLLM.

        Decoders with a reward for a whole text give it at each token: the last one is that of `classify`. Raises
        InvalidRequestError.
        """
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="token_classify",
            truncate_prompt_tokens=truncate_prompt_tokens,
            model=model,
            **of_vllm,
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: UseTqdm = True,
        truncate_prompt_tokens: int | None = None,
        model: str | None = None,
        **of_vllm: Any,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: one with each of `data_2`, or each of `data_1` with its fellow in `data_2`.

        A cross-encoder reads both texts; an embedding model gives the cosine of their vectors. Raises
        InvalidRequestError.
        """
        take_none_but_vllms("LLM.score", of_vllm)
        queries = [data_1] if isinstance(data_1, str) else list(data_1)
        documents = [data_2] if isinstance(data_2, str) else list(data_2)
        with progress(len(documents), "pair", use_tqdm) as done:
            return self._running.run(
                self._model.pooler.score(
                    queries, documents, done, model=model, truncate_prompt_tokens=truncate_prompt_tokens
                )
            )

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for; elsewhere SamplingParams' own defaults."""
        return self._model.default_params()

    def get_tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer, which has `encode`, `decode` and `apply_chat_template`.

        Raises InvalidRequestError if it was left out.
        """
        return self._model.tokenizer()

    def reset_prefix_cache(self, **of_vllm: Any) -> None:
        """Forget the cached beginnings of prompts."""
        take_none_but_vllms("LLM.reset_prefix_cache", of_vllm)
        self._running.run(self._model.reset_prefix_cache())

    def _answers(
        self,
        prompts: Sequence[Any],
        params: Any,
        unit: str,
        use_tqdm: UseTqdm,
        *,
        priority: int | Sequence[int] | None,
        **options: Any,
    ) -> list[RequestOutput]:
        priorities = [priority] * len(prompts) if isinstance(priority, int) else priority
        first_id = next(self._ids)
        for _ in range(len(prompts) - 1):
            next(self._ids)
        with progress(len(prompts), unit, use_tqdm) as done:
            return self._running.run(
                self._model.answer_all(prompts, params, done, first_id=first_id, priorities=priorities, **options)
            )

    @property
    def _model(self) -> OfflineModel:
        return self._running.model


def _listed(prompts: Any) -> list[Any]:
    """The prompts of one or of several."""
    if isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _beams(output: RequestOutput) -> BeamSearchOutput:
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                [*output.prompt_token_ids, *one.token_ids],
                one.text,
                one.cumulative_logprob or 0.0,
                one.logprobs or [],
                one.finish_reason,
                one.stop_reason,
            )
            for one in output.outputs
        ]
    )
