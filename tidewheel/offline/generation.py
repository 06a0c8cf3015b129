"""Requests from prompts, into the engine, and all of their answers out of it. Used on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tidewheel.engine.constraints.constraint import TokenConstraints
from tidewheel.engine.core.engine import Engine
from tidewheel.engine.core.request import Request
from tidewheel.engine.core.stream import RequestStream
from tidewheel.engine.errors import EngineDeadError
from tidewheel.engine.outputs import RequestOutput as EngineOutput
from tidewheel.engine.sampling_params import SamplingParams as EngineSampling
from tidewheel.server.generation.structured_output import structured_output
from tidewheel.server.generation.token_constraints import Frame, token_constraints
from tidewheel.server.protocol.sampling import GenerationBody

from .adapters import Adapter
from .answers import Answers, TokenNames
from .errors import engine_errors
from .outputs import RequestOutput
from .params import BeamSearchParams, RequestOutputKind, SamplingParams
from .prompts import EncodedPrompt

_STEPS_AHEAD = 4  # as many times more requests are in the engine than run in a step


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters that were checked and translated once, for all prompts that they are used with."""

    sampling: EngineSampling
    constraints: TokenConstraints | None = None
    truncate_to: int | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    body: GenerationBody | None = None

    @property
    def room(self) -> int:
        """How many tokens a prompt must leave free of the context."""
        return 0 if self.sampling.max_tokens == 0 else 1


class Job(NamedTuple):
    """A prompt to be answered. Its `adapter` is released by who runs it."""

    request_id: str
    prompt: EncodedPrompt
    plan: Plan
    priority: int = 0
    adapter: Adapter | None = None

    def release(self) -> None:
        """Give the adapter back."""
        if self.adapter is not None:
            self.adapter.release()


class Generator:
    """Runs prompts on an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._names = TokenNames(engine.tokenizer)

    async def plan(self, params: SamplingParams | BeamSearchParams) -> Plan:
        """What parameters mean for the engine; a grammar is compiled. Raises InvalidRequestError."""
        sampling = params.engine_sampling(self.engine.vocab_size)
        if isinstance(params, BeamSearchParams):
            return Plan(sampling)
        with engine_errors():
            body = params.body()
            constraints = await token_constraints(self.engine, body, structured_output(body))
        return Plan(sampling, constraints, params.truncate_prompt_tokens, params.detokenize, params.output_kind, body)

    async def framed(self, plan: Plan, frame: Frame | None) -> Plan:
        """The plan for a prompt whose answer has its content in this frame. Raises InvalidRequestError."""
        if frame is None or plan.body is None or plan.constraints is None or plan.constraints.grammar is None:
            return plan
        with engine_errors():
            wanted = structured_output(plan.body)
            return replace(plan, constraints=await token_constraints(self.engine, plan.body, wanted, frame=frame))

    def submit(self, job: Job) -> tuple[RequestStream, Answers]:
        """Hand a prompt to the engine. Raises InvalidRequestError and EngineDeadError."""
        prompt, plan = job.prompt, job.plan
        constraints = plan.constraints
        if constraints is not None and prompt.preface is not None:
            constraints = replace(constraints, preface=prompt.preface)
        adapter = job.adapter
        request = Request(
            job.request_id,
            prompt.token_ids,
            plan.sampling,
            job.priority,
            prompt.cache_salt,
            constraints,
            lora=None if adapter is None else adapter.lora,
            media=prompt.media,
        )
        stream = self.engine.submit(request)
        wanted = None if adapter is None else adapter.request
        names, detokenize = self._names, plan.detokenize
        return stream, Answers(job.request_id, prompt, stream, names, detokenize=detokenize, lora_request=wanted)

    async def read(
        self, stream: RequestStream, answers: Answers, kind: RequestOutputKind
    ) -> AsyncIterator[RequestOutput]:
        """The answers as they grow, each output with one of them; with FINAL_ONLY one output with all."""
        async for output in stream:
            answers.add(output)
            if kind is not RequestOutputKind.FINAL_ONLY:
                yield answers.output([output.index], as_delta=kind is RequestOutputKind.DELTA)
        self.require_alive()
        if kind is RequestOutputKind.FINAL_ONLY:
            yield answers.output()

    def require_alive(self) -> None:
        """Raises EngineDeadError if the engine has failed."""
        if self.engine.failure is not None:
            raise EngineDeadError(f"the engine has failed: {self.engine.failure}")


class Batch:
    """Many prompts. Only a limited number is in the engine at a time, so that memory does not grow with the batch.

    Only the end of a prompt costs the event loop more than adding tokens to lists. `done` is called with each job's
    position, counted from 0 in the order of `add`, and its answers.
    """

    def __init__(self, generator: Generator, done: Callable[[int, RequestOutput], None]) -> None:
        self._generator = generator
        self._done = done
        self._room = _STEPS_AHEAD * generator.engine.limits.max_num_seqs  # in sequences
        self._waiting: deque[tuple[int, Job]] = deque()
        self._running: dict[int, tuple[RequestStream, Job]] = {}
        self._num_added = 0
        self._is_complete = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, job: Job) -> None:
        """Run a prompt, now or when there is room, and release its adapter. Raises what has ended the batch."""
        if self._ended.done():
            job.release()
            self._ended.result()
        self._waiting.append((self._num_added, job))
        self._num_added += 1
        self._fill()

    async def finish(self) -> None:
        """Wait for all that were added. Raises the first error, which ends the batch."""
        self._is_complete = True
        self._fill()
        await self._ended

    def abort(self) -> None:
        """End everything that still runs."""
        self._fail(asyncio.CancelledError())

    def _fill(self) -> None:
        try:
            while self._waiting and self._room > 0 and not self._ended.done():
                self._start(*self._waiting.popleft())
        except Exception as failure:
            self._fail(failure)
        if self._is_complete and not self._waiting and not self._running and not self._ended.done():
            self._ended.set_result(None)

    def _start(self, position: int, job: Job) -> None:
        try:
            stream, answers = self._generator.submit(job)
        except BaseException:
            job.release()
            raise
        self._room -= job.plan.sampling.num_sequences
        self._running[position] = stream, job
        stream.read(_Reader(answers, lambda failure: self._end(position, job, answers, failure)))
        stream.resume()

    def _end(self, position: int, job: Job, answers: Answers, failure: Exception | None) -> None:
        if self._running.pop(position, None) is None:
            return  # it was aborted
        job.release()
        self._room += job.plan.sampling.num_sequences
        try:
            if failure is not None:
                raise failure
            self._generator.require_alive()
            self._done(position, answers.output())
        except Exception as error:
            self._fail(error)
        self._fill()

    def _fail(self, failure: BaseException) -> None:
        for _, job in self._waiting:
            job.release()
        self._waiting.clear()
        running, self._running = self._running, {}
        for stream, job in running.values():
            stream.abort()
            job.release()
        if self._ended.done():
            return
        if isinstance(failure, asyncio.CancelledError):
            self._ended.cancel()
        else:
            self._ended.set_exception(failure)


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Within it, garbage collections pass over what was there before: each would hold up a step for milliseconds."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Reader:
    """A sink that gathers one prompt's answers."""

    __slots__ = ("end", "push")

    def __init__(self, answers: Answers, end: Callable[[Exception | None], None]) -> None:
        self.push: Callable[[EngineOutput], None] = answers.add
        self.end = end
