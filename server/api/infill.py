"""llama.cpp's `/infill`, which editors ask for what belongs between two pieces of code, and its `/completion`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.outputs import FinishReason, RequestOutput

from ..chat.field_names import renamed_fields
from ..completions.fill_in_the_middle import Hole, Snippet
from ..completions.path import CompletionRun
from ..errors import bad_request
from ..generation.durations import durations
from ..generation.frames import event
from ..generation.streaming import EventStream, collect
from ..openapi.document import operation
from ..protocol.completions import CompletionRequest
from ..protocol.decode import BodyDecoder
from ..protocol.infill import (
    MAX_SNIPPETS,
    InfillAnswer,
    InfillRequest,
    InfillTimings,
    LlamaCppCompletionRequest,
)
from ..protocol.structured import StructuredOutputsField
from .app_state import AppState
from .body import whole_body
from .json_response import json_response

_NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "structured_outputs": "json_schema",
    "structured_outputs.json": "json_schema",
}
_INFILL_NAMES = {**_NAMES, "prompt": "input_prefix", "suffix": "input_suffix"}


class InfillEndpoint:
    """Fills holes and goes on with texts, in llama.cpp's shapes."""

    def __init__(self, state: AppState) -> None:
        self._path = state.completion_path
        self._encoder = state.encoder
        self._metrics = state.metrics
        self._decode = BodyDecoder(InfillRequest, notes=state.notes)
        self._decode_plain = BodyDecoder(LlamaCppCompletionRequest, notes=state.notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/infill", self._fill, methods=["POST"]),
            Route("/completion", self._complete, methods=["POST"]),
        ]

    @operation(
        "Fill in the middle of a text, in llama.cpp's shapes",
        InfillRequest,
        InfillAnswer,
        events=InfillAnswer,
        example={"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n", "n_predict": 16},
    )
    async def _fill(self, request: Request) -> Response:
        timer = self._metrics.start_timer()
        raw = await whole_body(request)
        body = self._decode(raw)
        hole = Hole(body.input_suffix, body.prompt or "", _snippets(body))
        with renamed_fields(_INFILL_NAMES):
            wanted = self._translated(body, body.input_prefix)
            run = await self._path.start(wanted, len(raw), timer, request.state.request_id, hole=hole)
        return await _answer(request, run, stream=body.stream)

    @operation(
        "Go on with a text, in llama.cpp's shapes",
        LlamaCppCompletionRequest,
        InfillAnswer,
        events=InfillAnswer,
        example={"prompt": "The tide turns", "n_predict": 16},
    )
    async def _complete(self, request: Request) -> Response:
        timer = self._metrics.start_timer()
        raw = await whole_body(request)
        body = self._decode_plain(raw)
        with renamed_fields(_NAMES):
            wanted = self._translated(body, body.prompt)
            wanted.ignore_eos = body.ignore_eos
            if body.json_schema is not None:
                wanted.structured_outputs = StructuredOutputsField(json=body.json_schema)
            run = await self._path.start(wanted, len(raw), timer, request.state.request_id)
        return await _answer(request, run, stream=body.stream)

    def _translated(
        self, body: InfillRequest | LlamaCppCompletionRequest, prompt: str | list[int]
    ) -> CompletionRequest:
        limited = body.n_predict is not None and body.n_predict >= 0
        return CompletionRequest(
            model=body.model,
            prompt=prompt if isinstance(prompt, str) else [*prompt],
            max_tokens=body.n_predict if limited else self._encoder.max_model_len,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            seed=body.seed,
            stop=body.stop,
            repetition_penalty=body.repeat_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
        )


async def _answer(request: Request, run: CompletionRun, *, stream: bool | None) -> Response:
    if stream:
        return _PieceStream(run)
    (outputs,) = await collect(request.receive, run.generation)
    return json_response(_ended(run, outputs[-1], "".join(output.text for output in outputs)))


def _snippets(body: InfillRequest) -> Sequence[Snippet]:
    extra = body.input_extra or []
    if len(extra) > MAX_SNIPPETS:
        raise bad_request(f"input_extra must have at most {MAX_SNIPPETS} entries, got {len(extra)}", "input_extra")
    return [Snippet(one.filename, one.text) for one in extra]


class _PieceStream(EventStream[RequestOutput]):
    """A streamed answer, which ends with the piece that says so."""

    done = b""

    def __init__(self, run: CompletionRun) -> None:
        super().__init__(run.generation)
        self._run = run
        self._last: RequestOutput | None = None

    def frame(self, output: RequestOutput) -> bytes:
        """See EventStream."""
        self._last = output
        return event(InfillAnswer(content=output.text, stop=False)) if output.text else b""

    def last_frames(self) -> Iterator[bytes]:
        """See EventStream."""
        assert self._last is not None, "an answer has an output at least"
        yield event(_ended(self._run, self._last, ""))


def _ended(run: CompletionRun, last: RequestOutput, text: str) -> InfillAnswer:
    usage, took = run.generation.usage(), durations(run.generation)
    word = last.stop_reason if isinstance(last.stop_reason, str) else ""
    prompt_ms, predicted_ms = 1000 * took.prompt_s, 1000 * took.decode_s
    count, written = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens, usage.completion_tokens
    return InfillAnswer(
        content=text,
        stop=True,
        model=run.model,
        tokens_predicted=written,
        tokens_evaluated=usage.prompt_tokens,
        tokens_cached=usage.prompt_tokens_details.cached_tokens,
        truncated=False,
        stop_type="limit" if last.finish_reason is FinishReason.LENGTH else "word" if word else "eos",
        stopping_word=word,
        timings=InfillTimings(
            count, prompt_ms, _rate(count, prompt_ms), written, predicted_ms, _rate(written, predicted_ms)
        ),
    )


def _rate(tokens: int, milliseconds: float) -> float:
    return 1000 * tokens / milliseconds if milliseconds > 0 else 0.0
