"""LLMEngine: a model in this process, whose answers are read step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tidewheel.engine.core.stream import RequestStream
from tidewheel.engine.errors import InvalidRequestError, quoted
from tidewheel.engine.outputs import RequestOutput as EngineOutput

from .answers import Answers
from .chat_tokenizer import ChatTokenizer
from .engine_args import EngineArgs
from .generation import Job
from .lora_request import LoRARequest
from .model import ModelConfig
from .not_there import NamesOfVllm
from .outputs import RequestOutput
from .params import RequestOutputKind, SamplingParams
from .prompts import PromptType
from .running import RunningModel
from .vllm_calls import take_none_but_vllms


class LLMEngine(NamesOfVllm):
    """Requests that are added one by one, and the answers of all of them as they grow.

    The model computes in threads of its own, also between calls of `step`. Methods may be called from any thread.
    """

    def __init__(self, running: RunningModel) -> None:
        self._running = running
        self._requests: dict[str, _Request] = {}  # this and the next two are changed on the event loop alone
        self._grown: dict[str, _Request] = {}
        self._has_news = asyncio.Event()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> LLMEngine:
        """Load a model. `others` are further arguments of LLM. Raises as LLM does."""
        return cls(RunningModel(engine_args.options(**others)))

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **of_vllm: Any,
    ) -> None:
        """Answer a prompt, beside all others. Arguments are as in LLM.generate. Waits while an adapter that is not in
        memory has no room there, because others answer.

        Raises InvalidRequestError for what cannot be served, or for an id that is in use. It changes no other request.
        """
        take_none_but_vllms("LLMEngine.add_request", of_vllm)
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"params must be SamplingParams, got {quoted(params)}; LLM.encode is for embeddings", "params"
            )
        self._running.run(self._add(request_id, prompt, params, lora_request, priority))

    def step(self) -> list[RequestOutput]:
        """The requests that have grown since the last call, one output for each. Waits until there is one.

        An output has all answers so far, unless `output_kind` in its parameters asks for the new parts only, or for all
        at the end. In a request's last output, `finished` is True. If all requests are finished, the list is empty.
        Raises EngineDeadError if the engine has failed.
        """
        return self._running.run(self._step())

    def has_unfinished_requests(self) -> bool:
        """Whether there are requests whose last output `step` has not given yet."""
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """How many there are of these."""
        return len(self._requests)

    def abort_request(self, request_id: str | Sequence[str]) -> None:
        """End requests, which give no more outputs. Does nothing for those that have ended."""
        self._running.run(self._abort([request_id] if isinstance(request_id, str) else request_id))

    @property
    def model_config(self) -> ModelConfig:
        """What the loaded model is."""
        return self._running.model.model_config()

    def get_model_config(self) -> ModelConfig:
        """The same as `model_config`."""
        return self.model_config

    def get_tokenizer(self) -> ChatTokenizer:
        """As LLM's."""
        return self._running.model.tokenizer()

    def reset_prefix_cache(self, **of_vllm: Any) -> None:
        """Forget the cached beginnings of prompts."""
        take_none_but_vllms("LLMEngine.reset_prefix_cache", of_vllm)
        self._running.run(self._running.model.reset_prefix_cache())

    def shutdown(self) -> None:
        """End what runs, and free threads and memory. Calling it twice is allowed."""
        self._running.close()

    async def _add(
        self, name: str, prompt: PromptType, params: SamplingParams, lora_request: LoRARequest | None, priority: int
    ) -> None:
        model = self._running.model
        generator = model.generator
        plan = await generator.plan(params)
        [wanted] = model.adapters.each(lora_request, 1)
        job = await model.job(name, prompt, plan, wanted, priority)
        try:
            if name in self._requests:
                raise InvalidRequestError(f"a request with the id {quoted(name)} runs already", "request_id")
            stream, answers = generator.submit(job)
        except BaseException:
            job.release()
            raise
        request = self._requests[name] = _Request(job, stream, answers, self._tell)
        stream.read(request)
        stream.resume()

    async def _step(self) -> list[RequestOutput]:
        while not self._grown and self._requests:
            self._has_news.clear()
            await self._has_news.wait()
        grown, self._grown = self._grown, {}
        try:
            self._running.model.generator.require_alive()
        except BaseException:
            self._requests.clear()
            raise
        for name, request in grown.items():
            if request.failure is not None:
                del grown[name], self._requests[name]
                self._grown = grown  # for the next step
                raise request.failure
        for name, request in grown.items():
            if request.answers.finished:
                del self._requests[name]
        return [request.output() for request in grown.values()]

    async def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            request = self._requests.pop(name, None)
            self._grown.pop(name, None)
            if request is not None:
                request.stream.abort()
        self._has_news.set()

    def _tell(self, request: _Request) -> None:
        if self._requests.get(request.name) is request:  # else it was aborted
            self._grown[request.name] = request
            self._has_news.set()


class _Request:
    """A request that runs: the sink of its stream, which gathers the answers until a step takes them."""

    def __init__(self, job: Job, stream: RequestStream, answers: Answers, tell: Callable[[_Request], None]) -> None:
        self.name = job.request_id
        self.stream = stream
        self.answers = answers
        self.failure: Exception | None = None
        self._job = job
        self._kind = job.plan.output_kind
        self._tell = tell
        self._grown: set[int] = set()

    def output(self) -> RequestOutput:
        if self._kind is not RequestOutputKind.DELTA:
            return self.answers.output()
        indices, self._grown = sorted(self._grown), set()
        return self.answers.output(indices, as_delta=True)

    def push(self, output: EngineOutput) -> None:
        self.answers.add(output)
        self._grown.add(output.index)
        if self._kind is not RequestOutputKind.FINAL_ONLY:
            self._tell(self)

    def end(self, failure: Exception | None) -> None:
        self._job.release()
        self.failure = failure
        self._tell(self)
