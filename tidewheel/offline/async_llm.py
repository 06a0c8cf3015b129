"""AsyncLLM: a model in this process, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import weakref
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Any

from tidewheel.engine.core.stream import RequestStream
from tidewheel.engine.errors import EngineDeadError, InvalidRequestError, TidewheelError

from .chat_tokenizer import ChatTokenizer
from .engine_args import EngineArgs
from .generation import Job
from .lora_request import LoRARequest
from .model import ModelConfig, OfflineModel
from .not_there import NamesOfVllm
from .options import offline_options
from .outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from .params import SamplingParams
from .pooling import Text
from .pooling_params import PoolingParams, pooling_options
from .prompts import Conversation, PromptType
from .vllm_calls import take_none_but_vllms, without_vllms


class AsyncLLM(NamesOfVllm):
    """A model in this process. Answers are read as they grow. The arguments are the same as LLM's.

    It belongs to the event loop of its first request. Leaving a generator early aborts its request.
    """

    def __init__(self, model: str | None = None, *, runner: str | None = None, **options: Any) -> None:
        """Load the model, which blocks. Raises as LLM does."""
        self._model = OfflineModel(offline_options(model, runner, options))
        # A program that ends, or forgets this, without a shutdown: native threads must not outlive the interpreter.
        weakref.finalize(self, self._model.close)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._requests: dict[str, _Request] = {}
        self._ids = itertools.count()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> AsyncLLM:
        """An AsyncLLM with these arguments, and others. Raises as the constructor does."""
        return cls(**engine_args.given(), **others)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **of_vllm: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answers to a prompt as they grow. Each output has one of the `n` answers, and the last of all is
        `finished`. Its text is all there is so far, or as `sampling_params.output_kind` says.

        `request_id` is for `abort`. `lora_request` is the adapter that answers, see LLM.generate. Raises
        InvalidRequestError for what cannot be served.
        """
        take_none_but_vllms("AsyncLLM.generate", of_vllm)
        params = sampling_params or self.get_default_sampling_params()
        async with contextlib.aclosing(self._run(params, request_id, priority, lora_request, prompt, None)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answers to a conversation as they grow, as `generate` gives them. `options` are as in LLM.chat."""
        params = sampling_params or self.get_default_sampling_params()
        settings = options.pop("mm_processor_kwargs", None)
        options = {**without_vllms(options), "mm_processor_kwargs": settings or None}
        run = self._run(params, request_id, priority, lora_request, messages, options)
        async with contextlib.aclosing(run) as outputs:
            async for output in outputs:
                yield output

    async def embed(self, prompts: Sequence[Text], **options: Any) -> list[EmbeddingRequestOutput]:
        """The vectors of texts. `options` are as in LLM.embed."""
        self._start()
        options = without_vllms(options)
        names = ("normalize", "use_activation")
        of_call = PoolingParams(**{name: options.pop(name, None) for name in names}, task="embed").given()
        wanted = pooling_options(options.pop("pooling_params", None), **options, **of_call)
        return await self._model.pooler.embed(prompts, lambda count: None, **wanted)

    async def classify(self, prompts: Sequence[Text], **options: Any) -> list[ClassificationRequestOutput]:
        """The probabilities of texts' labels. `options` are as in LLM.classify."""
        self._start()
        options = without_vllms(options)
        wanted = pooling_options(options.pop("pooling_params", None), **options, pooling_task="classify")
        return await self._model.pooler.classify(prompts, lambda count: None, **wanted)

    async def encode(
        self,
        prompt: Text,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        **of_vllm: Any,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """What the task of the parameters makes of one text, as LLM.encode gives it: a single output."""
        take_none_but_vllms("AsyncLLM.encode", of_vllm)
        self._start()
        options = pooling_options(pooling_params)
        for output in await self._model.pooler.encode([prompt], lambda count: None, **options):
            output.request_id = request_id or output.request_id
            yield output

    async def reset_prefix_cache(self, **of_vllm: Any) -> None:
        """Forget the cached beginnings of prompts."""
        take_none_but_vllms("AsyncLLM.reset_prefix_cache", of_vllm)
        await self._model.reset_prefix_cache()

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine has failed."""
        if self._model.engine is not None:
            self._model.generator.require_alive()
        if (failure := self._model.encoders.failure) is not None:
            raise EngineDeadError(f"the encoders have failed: {failure}")

    async def get_model_config(self) -> ModelConfig:
        """The same as `model_config`."""
        return self.model_config

    @property
    def model_config(self) -> ModelConfig:
        """What the loaded model is."""
        return self._model.model_config()

    async def score(self, data_1: Sequence[str], data_2: Sequence[str], **options: Any) -> list[ScoringRequestOutput]:
        """How well texts go together. `options` are as in LLM.score."""
        self._start()
        return await self._model.pooler.score(data_1, data_2, lambda count: None, **without_vllms(options))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several: the last output has the finish reason abort. Does nothing for ended ones."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if name in self._requests:
                self._requests[name].abort()

    def shutdown(self) -> asyncio.Task[None]:
        """End what runs, and free threads and memory. Call it on the event loop; await it to know that it is done."""
        return asyncio.ensure_future(self._model.stop(), loop=self._loop)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for; elsewhere SamplingParams' own defaults."""
        return self._model.default_params()

    def get_tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer, which has `encode`, `decode` and `apply_chat_template`.

        Raises InvalidRequestError if it was left out.
        """
        return self._model.tokenizer()

    async def _run(
        self,
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        lora_request: LoRARequest | None,
        prompt: PromptType | Conversation,
        chat: dict[str, Any] | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self._start()
        name = f"request-{next(self._ids)}" if request_id is None else request_id
        if name in self._requests:
            raise InvalidRequestError(f"a request with the id {name!r} runs already", "request_id")
        request = self._requests[name] = _Request()
        model, generator = self._model, self._model.generator
        job: Job | None = None
        try:
            plan = await generator.plan(params)
            [wanted] = model.adapters.each(lora_request, 1)
            job = await model.job(name, prompt, plan, wanted, priority, chat)
            request.stream, answers = generator.submit(job)
            if request.is_aborted:
                request.stream.abort()
            async for output in generator.read(request.stream, answers, plan.output_kind):
                yield output
        finally:
            del self._requests[name]
            request.abort()
            if job is not None:
                job.release()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._model.start()
            self._loop = loop
        elif self._loop is not loop:
            raise TidewheelError("this AsyncLLM belongs to another event loop: make one for each, or use LLM")


class _Request:
    """A request that runs; it has no stream while its prompt is encoded."""

    def __init__(self) -> None:
        self.stream: RequestStream | None = None
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True
        if self.stream is not None:
            self.stream.abort()


AsyncLLMEngine = AsyncLLM
"""The name that older versions of vLLM have for it."""
