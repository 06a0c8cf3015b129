"""One HTTP request's way through the engine: its prompts submitted, their outputs merged, measured and logged."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus

from tidewheel.engine.choice import Tap
from tidewheel.engine.constraints.constraint import Preface, TokenConstraints
from tidewheel.engine.constraints.grammar import StructuredOutput
from tidewheel.engine.engine import Engine
from tidewheel.engine.outputs import FinishReason, RequestOutput
from tidewheel.engine.request import Request
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.stream import RequestStream

from ..errors import ApiError, ClientGone, bad_request
from ..protocol.sampling import GenerationBody
from ..protocol.usage import PromptTokensDetails, Usage
from ..telemetry.metrics import RequestTimer
from ..telemetry.reports import Ended, RequestReports
from ..telemetry.tracing import Tracer
from .admission import Admission, request_timeout
from .answer_size import bounded
from .token_constraints import Calls, token_constraints

_OPERATIONS = {"cmpl": "text_completion"}  # OpenTelemetry's names for the kinds of answers
_MERGE_QUEUE_SIZE = 64  # outputs; a full queue leaves the rest in the engine's streams


class Generation:
    """The engine requests of one HTTP request, one for each prompt, as a single stream of outputs.

    `prompt_tokens` is the length of all prompts, `n` the number of choices each has. `close` must be called in the
    end. It aborts what is unfinished, so nothing goes on for a reader who has left.
    """

    def __init__(
        self,
        generation_id: str,
        streams: Sequence[RequestStream],
        prompt_tokens: int,
        n: int,
        timer: RequestTimer,
        on_close: Callable[[Generation], None],
    ) -> None:
        self.id = generation_id
        self.timer = timer
        self.client_gone = False
        self.timed_out = False
        self.num_choices = len(streams) * n
        self._n = n
        self._prompt_tokens = prompt_tokens
        self._streams = streams
        self._on_close = on_close
        self._pumps: list[asyncio.Task[None]] = []
        self._cached_tokens = [0] * len(streams)
        self._closed = False

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many choices it has."""
        completion_tokens = self.timer.completion_tokens
        details = PromptTokensDetails(sum(self._cached_tokens))
        return Usage(self._prompt_tokens, completion_tokens, self._prompt_tokens + completion_tokens, details)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Every output with its choice's index, which counts over prompts and then over `n`.

        Raises ApiError if a choice fails or the server stops, and ClientGone after `abort`.
        """
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield self._account(0, output), output
        else:
            async for prompt_index, output in self._merged():
                yield self._account(prompt_index, output), output
        if self.client_gone:
            raise ClientGone

    async def forward(self, sink: Callable[[int, RequestOutput], bool], tap: Callable[[int], Tap | None]) -> None:
        """Hands the outputs of a single prompt to `sink` as they come, with no task in between.

        `tap` says who takes the texts of a choice's tokens that say nothing else, and tells the timer of each; None if
        `sink` does.

        Returns when `sink` returns False, or at the end; at once for several prompts, whose outputs are merged. Raises
        what `outputs` raises.
        """
        if len(self._streams) == 1:
            await self._streams[0].forward(lambda output: sink(self._account(0, output), output), tap)

    def abort(self) -> None:
        """Ends the generation because its client has gone."""
        self.client_gone = True
        self._abort_streams()

    def time_out(self) -> None:
        """Ends the generation because it has taken too long; its client is told."""
        self.timed_out = True
        self._abort_streams()

    def _abort_streams(self) -> None:
        for stream in self._streams:
            stream.abort()

    def close(self) -> None:
        """Aborts what is unfinished and reports the request. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        for pump in self._pumps:
            pump.cancel()
        self._abort_streams()
        self._on_close(self)

    def _account(self, prompt_index: int, output: RequestOutput) -> int:
        choice = prompt_index * self._n + output.index
        self._cached_tokens[prompt_index] = max(self._cached_tokens[prompt_index], output.num_cached_tokens)
        times = self._streams[prompt_index].choices[output.index].times
        self.timer.on_output(output, choice, None if times is None else times.first_token)
        if output.finish_reason is FinishReason.ABORT:
            if self.client_gone:
                raise ClientGone
            if self.timed_out:
                raise request_timeout()
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE, "the server stopped before the answer was complete", code="aborted"
            )
        if output.finish_reason is FinishReason.INVALID:
            raise bad_request(output.error or "the request cannot be served", code="unsatisfiable_constraints")
        if output.finish_reason is FinishReason.ERROR:
            raise ApiError(
                HTTPStatus.INTERNAL_SERVER_ERROR, output.error or "the request failed", code="generation_failed"
            )
        return choice

    async def _merged(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(_MERGE_QUEUE_SIZE)

        async def pump(prompt_index: int, stream: RequestStream) -> None:
            try:
                async for output in stream:
                    await queue.put((prompt_index, output))
            except Exception as failure:
                await queue.put(failure)
            await queue.put(None)

        self._pumps = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(self._streams)]
        unfinished = len(self._pumps)
        while unfinished:
            item = await queue.get()
            if item is None:
                unfinished -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item


class Generations:
    """Starts generations on the engine, as far as `admission` allows, and reports them when they end."""

    def __init__(self, engine: Engine, admission: Admission, reports: RequestReports) -> None:
        self.admission = admission
        self._engine = engine
        self._reports = reports

    async def constraints(
        self,
        body: GenerationBody,
        output: StructuredOutput | None = None,
        *,
        calls: Calls | None = None,
        preface: Preface | None = None,
    ) -> TokenConstraints | None:
        """See `token_constraints`; what it gives is for `start`."""
        return await token_constraints(self._engine, body, output, calls=calls, preface=preface)

    def start(
        self,
        kind: str,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        timer: RequestTimer,
        client_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        constraints: TokenConstraints | None = None,
        request_id: str | None = None,
        shows_prompt: bool = False,
    ) -> Generation:
        """Submits one engine request a prompt. `kind` begins the id of the answer, as OpenAI's ids do.

        `request_id` is the rest of that id, by default one that nobody else has. `shows_prompt` says that each choice
        has the prompt's text or token ids. Raises what `bounded`, Admission.admit and Engine.submit raise, with nothing
        left running.
        """
        sampling = bounded(
            kind,
            [len(prompt) for prompt in prompts],
            sampling,
            shows_prompt=shows_prompt,
            max_model_len=self._engine.max_model_len,
            max_bytes=self.admission.limits.max_answer_bytes,
        )
        demand = self.admission.admit(prompts, sampling)
        generation_id = f"{kind}-{request_id or uuid.uuid4().hex}"
        streams: list[RequestStream] = []
        try:
            for i, prompt in enumerate(prompts):
                request_id = generation_id if len(prompts) == 1 else f"{generation_id}-{i}"
                request = Request(request_id, prompt, sampling, priority, cache_salt, constraints)
                streams.append(self._engine.submit(request))
        except BaseException:
            for stream in streams:
                stream.abort()
            self.admission.release(demand, ())
            raise
        lengths = [len(prompt) for prompt in prompts]
        context = Tracer.context()
        deadline: asyncio.TimerHandle | None = None

        def on_close(ended: Generation) -> None:
            if deadline is not None:
                deadline.cancel()
            choices = [stream.choices for stream in streams]
            self.admission.release(demand, [choice.num_tokens for answers in choices for choice in answers])
            report = Ended(
                id=generation_id,
                client_id=client_id,
                operation=_OPERATIONS.get(kind, "chat"),
                prompt_lengths=lengths,
                sampling=sampling,
                choices=choices,
                timer=timer,
                usage=ended.usage(),
                cut_short="client_gone" if ended.client_gone else "timed_out" if ended.timed_out else None,
                trace_context=context,
            )
            self._reports.report(report)

        generation = Generation(generation_id, streams, sum(lengths), sampling.n, timer, on_close)
        timeout = self.admission.limits.request_timeout_s
        if timeout is not None:
            left = timer.started + timeout - time.perf_counter()
            deadline = asyncio.get_running_loop().call_later(left, generation.time_out)
        return generation
