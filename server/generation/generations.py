"""One HTTP request's way through the engine: its prompts submitted, their outputs merged, measured and logged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus

import msgspec

from tidewheel.engine.adapters.registry import LoraLease
from tidewheel.engine.constraints.constraint import Preface, TokenConstraints
from tidewheel.engine.constraints.grammar import StructuredOutput
from tidewheel.engine.constraints.thinking_budget import ThinkingBudget
from tidewheel.engine.core.engine import Engine
from tidewheel.engine.core.request import Request
from tidewheel.engine.core.stream import RequestStream, Sink
from tidewheel.engine.media.media import MediaSpan
from tidewheel.engine.outputs import FinishReason, RequestOutput
from tidewheel.engine.sampling_params import SamplingParams

from ..errors import ApiError, ClientGone, bad_request
from ..http.api_keys import current_tenant
from ..http.clients import current_client
from ..http.rights import require_priority
from ..ids import new_id
from ..protocol.sampling import GenerationBody
from ..protocol.usage import PromptTokensDetails, Usage
from ..telemetry.metrics import RequestTimer
from ..telemetry.reports import Ended, RequestReports
from ..telemetry.text_log import AnswerTexts, Shown, TextLog
from ..telemetry.tracing import Tracer
from .admission import Admission, Demand
from .answer_size import bounded
from .backlog import request_timeout
from .token_constraints import Calls, Frame, token_constraints

_OPERATIONS = {"cmpl": "text_completion"}  # OpenTelemetry's names for the kinds of answers


class Generation:
    """The engine requests of one HTTP request, one for each prompt, as a single source of outputs.

    An output's index counts over prompts and then over `n`, the choices of each. `prompt_tokens` is the length of all
    prompts. `close` must be called in the end. It aborts what is unfinished, so nothing goes on for a client that has
    gone.
    """

    __slots__ = (
        "_is_closed",
        "_is_paused",
        "_num_flowing",
        "_on_close",
        "_prompt_tokens",
        "_sink",
        "_streams",
        "choices",
        "client_gone",
        "id",
        "timed_out",
        "timer",
    )

    def __init__(
        self,
        generation_id: str,
        streams: Sequence[RequestStream],
        prompt_tokens: int,
        timer: RequestTimer,
        on_close: Callable[[Generation], None],
    ) -> None:
        self.id = generation_id
        self.timer = timer
        self.client_gone = False
        self.timed_out = False
        self.choices = [choice for stream in streams for choice in stream.choices]
        self._prompt_tokens = prompt_tokens
        self._streams = streams
        self._on_close = on_close
        self._sink: Sink[RequestOutput] | None = None
        self._num_flowing = len(streams)
        self._is_paused = True
        self._is_closed = False

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many choices it has."""
        completion_tokens = self.timer.completion_tokens
        cached = sum(max(choice.num_cached_tokens for choice in stream.choices) for stream in self._streams)
        details = PromptTokensDetails(cached)
        return Usage(self._prompt_tokens, completion_tokens, self._prompt_tokens + completion_tokens, details)

    def read(self, sink: Sink[RequestOutput]) -> None:
        """Pushes all outputs to `sink`, as they come, and the end.

        That is a failure if the sink has raised it, an ApiError if a choice fails or the server stops, and ClientGone
        after `abort`.
        """
        self._sink = sink
        for stream in self._streams:
            stream.read(self)
        self.resume()

    def pause(self) -> None:
        """Pushes nothing until `resume`; outputs that come meanwhile are merged."""
        self._is_paused = True
        for stream in self._streams:
            stream.pause()

    def resume(self) -> None:
        """Goes on pushing."""
        self._is_paused = self._sink is None
        for stream in self._streams:
            if self._is_paused:
                return
            stream.resume()

    async def feed(self, push: Callable[[RequestOutput], None]) -> None:
        """Calls `push` with all outputs, as they come, and waits for the end. Raises what `read` calls its failure."""
        feed = _Feed(push)
        self.read(feed)
        await feed.ended

    def push(self, output: RequestOutput) -> None:
        """Takes an output of a stream. See Sink."""
        self.timer.on_output(output, self.choices[output.index])
        assert self._sink is not None, "a stream needs a sink before it can deliver"
        failure = None if output.finish_reason is None else self._failure(output)
        if failure is None:
            self._sink.push(output)
            return
        if output.text:  # from before the failure; the two outputs were merged
            self._sink.push(msgspec.structs.replace(output, finish_reason=None, error=None))
        try:
            raise failure
        finally:
            del failure  # whose traceback knows this frame: only a collection of garbage could free the answer

    def end(self, failure: Exception | None) -> None:
        """Takes the end of a stream; with the last, or a failure, all has ended. See Sink."""
        self._num_flowing -= 1
        if failure is None and self._num_flowing:
            return
        if failure is None and self.client_gone:
            failure = ClientGone()
        sink, self._sink = self._sink, None
        self.pause()
        assert sink is not None, "a stream needs a sink before it can deliver"
        sink.end(failure)

    def abort(self) -> None:
        """Ends the generation because its client has gone."""
        self.client_gone = True
        self._abort_streams()

    def time_out(self) -> None:
        """Ends the generation because it has taken too long; its client gets an error."""
        self.timed_out = True
        self._abort_streams()

    def close(self) -> None:
        """Aborts what is unfinished, and reports the request. The sink gets nothing more.

        Later calls do nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._sink = None
        self.pause()
        self._abort_streams()
        self._on_close(self)

    def _abort_streams(self) -> None:
        for stream in self._streams:
            stream.abort()

    def _failure(self, output: RequestOutput) -> Exception | None:
        """The error in a choice's last output, if the choice is not complete."""
        if output.finish_reason is FinishReason.ABORT:
            if self.client_gone:
                return ClientGone()
            if self.timed_out:
                return request_timeout()
            message = "the server stopped before the answer was complete"
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="aborted")
        if output.finish_reason is FinishReason.INVALID:
            return bad_request(output.error or "the request cannot be served", code="unsatisfiable_constraints")
        if output.finish_reason is FinishReason.ERROR:
            message = output.error or "the request failed"
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="generation_failed")
        return None


class _LoggedGeneration(Generation):
    """One whose answers are collected for the log."""

    __slots__ = ("answers",)

    answers: AnswerTexts

    def push(self, output: RequestOutput) -> None:
        """See Generation."""
        self.answers.add(output)
        super().push(output)


class _Feed:
    """A sink that calls a function; its end can be awaited."""

    def __init__(self, push: Callable[[RequestOutput], None]) -> None:
        self.push = push
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, failure: Exception | None) -> None:
        if self.ended.done():  # nothing waits for it any more
            return
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)


class Generations:
    """Starts generations on the engine, as far as `admission` allows, and reports them when they end.

    `texts` logs what they say, if anything does. `default_max_tokens` is the limit that the server sets for all
    answers. `max_model_len` is the context in tokens where that is shorter than the engine's. Cached prefixes are each
    tenant's own, unless `shares_prefixes`.
    """

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        reports: RequestReports,
        texts: TextLog | None = None,
        default_max_tokens: int | None = None,
        *,
        max_model_len: int | None = None,
        shares_prefixes: bool = False,
    ) -> None:
        self.admission = admission
        self._max_model_len = max_model_len
        self._engine = engine
        self._reports = reports
        self._texts = texts
        self._max_tokens = default_max_tokens
        self._shares_prefixes = shares_prefixes

    async def constraints(
        self,
        body: GenerationBody,
        wanted: StructuredOutput | None,
        output: StructuredOutput | Calls | None = None,
        *,
        calls: Calls | None = None,
        preface: Preface | None = None,
        frame: Frame | None = None,
        thinking: ThinkingBudget | None = None,
    ) -> TokenConstraints | None:
        """See `token_constraints`; what it gives is for `start`."""
        return await token_constraints(
            self._engine, body, wanted, output, calls=calls, preface=preface, frame=frame, thinking=thinking
        )

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
        lora: LoraLease | None = None,
        media: tuple[MediaSpan, ...] = (),
        shows_prompt: bool = False,
        shown_prompts: Sequence[Shown] | None = None,
    ) -> Generation:
        """Submits one engine request a prompt. `kind` begins the id of the answer, as OpenAI's ids do.

        `lora` is released when the generation is closed. `media` are the images of the prompts, each of which has all
        of them. `request_id` is the rest of that id, by default a new unique
        one. `shows_prompt` says that each choice has the prompt's text or token ids. `shown_prompts` are the prompts as
        the log shows them, by default their token ids. Raises what `require_priority`, `bounded`, Admission.admit and
        Engine.submit raise; then nothing is left running.
        """
        try:
            require_priority(priority)
            sampling, demand = self._admitted(kind, prompts, sampling, lora, media, shows_prompt=shows_prompt)
        except BaseException:
            _release(lora)
            raise
        generation_id = f"{kind}-{request_id or new_id()}"
        streams: list[RequestStream] = []
        texts = self._texts
        salt = cache_salt if self._shares_prefixes else current_tenant().salt(cache_salt)
        try:
            if texts is not None:
                texts.log_prompts(generation_id, client_id, prompts if shown_prompts is None else shown_prompts)
            for i, prompt in enumerate(prompts):
                request = Request(
                    generation_id if len(prompts) == 1 else f"{generation_id}-{i}",
                    prompt,
                    sampling,
                    priority,
                    salt,
                    constraints,
                    lora=None if lora is None else lora.lora,
                    first_choice=i * sampling.n,
                    client=current_client(),
                    media=media,
                    max_model_len=self._max_model_len,
                )
                streams.append(self._engine.submit(request))
        except BaseException:
            for stream in streams:
                stream.abort()
            self.admission.release(demand, ())
            _release(lora)
            raise
        lengths = [len(prompt) for prompt in prompts]
        context = Tracer.context()
        deadline: asyncio.TimerHandle | None = None

        def on_close(ended: Generation) -> None:
            if deadline is not None:
                deadline.cancel()
            _release(lora)
            choices = [stream.choices for stream in streams]
            self.admission.release(demand, [choice.num_tokens for answers in choices for choice in answers])
            report = Ended(
                id=generation_id,
                client_id=client_id,
                adapter=None if lora is None else lora.name,
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
            if texts is not None and isinstance(ended, _LoggedGeneration):
                texts.log_answers(generation_id, client_id, ended.answers)

        generation: Generation
        if texts is not None and texts.logs_answers:
            logged = _LoggedGeneration(generation_id, streams, sum(lengths), timer, on_close)
            logged.answers = AnswerTexts(texts.max_len, has_text=self._engine.tokenizer.has_text)
            generation = logged
        else:
            generation = Generation(generation_id, streams, sum(lengths), timer, on_close)
        timeout = self.admission.limits.request_timeout_s
        if timeout is not None:
            left = timer.started + timeout - time.perf_counter()
            deadline = asyncio.get_running_loop().call_later(left, generation.time_out)
        return generation

    def _admitted(
        self,
        kind: str,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        lora: LoraLease | None,
        media: Sequence[MediaSpan],
        *,
        shows_prompt: bool,
    ) -> tuple[SamplingParams, Demand]:
        context = self._engine.context_of(1.0 if lora is None else lora.lora.rope_factor)
        sampling = bounded(
            kind,
            [len(prompt) for prompt in prompts],
            sampling,
            shows_prompt=shows_prompt,
            max_model_len=min(context, self._max_model_len or context),
            default_max_tokens=self._max_tokens,
            max_bytes=self.admission.limits.max_answer_bytes,
        )
        return sampling, self.admission.admit(prompts, sampling, media)


def _release(lora: LoraLease | None) -> None:
    if lora is not None:
        lora.release()
