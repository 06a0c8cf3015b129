"""Answers, whole and as server-sent events: one frame an output, no faster than the client reads.

Back-pressure is the socket's: a send waits while the connection's write buffer is above its high-water mark
(64 KiB), and only then is the next output taken from the engine. What a stalled reader can hold back is therefore
that buffer and its own answer, which the engine bounds. A client that hangs up is aborted at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidewheel.engine.choice import Tap
from tidewheel.engine.outputs import RequestOutput

from ..errors import ApiError, ClientGone, as_api_error
from ..http.connections import DIRECT_WRITE
from .generations import Generation

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect frames otherwise
]

encode_json = msgspec.json.Encoder().encode


def event(payload: msgspec.Struct) -> bytes:
    """One frame."""
    return b"data: " + encode_json(payload) + b"\n\n"


def around_text(payload: msgspec.Struct, field: str) -> tuple[bytes, bytes]:
    """What comes before and after the JSON of a text in the frame of `payload`, whose `field` is the empty text."""
    marker = b'"%b":""' % field.encode()
    before, found, after = event(payload).partition(marker)
    assert found, f"{field} is not empty"
    return before + marker[:-2], after


def named_event(payload: msgspec.Struct) -> bytes:
    """One frame of a protocol whose events have names: the payload's `type`, which is its struct's tag."""
    return b"event: %b\ndata: %b\n\n" % (str(payload.__struct_config__.tag).encode(), encode_json(payload))


def named_events(payloads: Iterable[msgspec.Struct]) -> bytes:
    """Their frames, one after the other; each is encoded before the next one is asked for."""
    return b"".join(map(named_event, payloads))


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How a protocol's streams end: `done` after a whole answer, `failed` after one that broke off."""

    done: bytes
    failed: Callable[[ApiError], bytes]


OPENAI_END = StreamEnd(DONE, lambda error: b"data: " + error.body() + b"\n\n" + DONE)


class FrameSource(Protocol):
    """What a stream reads from: it is aborted if the client hangs up, and closed in any case."""

    def frames(self) -> AsyncIterator[bytes]:
        """All frames, or those that nobody has got by `forward`."""
        ...

    async def forward(self, write: Callable[[bytes], bool]) -> None:
        """Writes frames as they are made until `write` returns False or there are none to come; or returns at once."""
        ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class AnswerFrames:
    """The frames of a generation: `begin`'s, if any, `frame`'s for each choice's output, and `end`'s.

    Each may be empty. They are called in this order, as the frames are wanted. `parts` takes the place of `frame` where
    one output may be much to tell; it and `end` give several frames, between which others have their turn.

    `around_text` says what comes before and after the JSON of the text in the frames that a choice has from now on for
    tokens that say nothing else; None if `frame` is to make all of them.
    """

    def __init__(
        self,
        generation: Generation,
        frame: Callable[[int, RequestOutput], bytes],
        *,
        begin: Callable[[], bytes] = bytes,
        end: Callable[[], Iterable[bytes]] = tuple,
        parts: Callable[[int, RequestOutput], Iterable[bytes]] | None = None,
        around_text: Callable[[int], tuple[bytes, bytes] | None] = lambda choice: None,
    ) -> None:
        self._generation = generation
        self._frame = frame
        self._around_text = around_text
        self._begin = begin
        self._end = end
        self._parts = parts

    async def frames(self) -> AsyncIterator[bytes]:
        """See FrameSource."""
        if first := self._begin():
            yield first
        async for choice, output in self._generation.outputs():
            if self._parts is None:
                if frame := self._frame(choice, output):
                    yield frame
                continue
            for part in self._parts(choice, output):
                yield part
                await asyncio.sleep(0)
        for last in self._end():
            yield last
            await asyncio.sleep(0)

    async def forward(self, write: Callable[[bytes], bool]) -> None:
        """See FrameSource."""
        if self._parts is not None:
            return
        make = self._frame

        def sink(choice: int, output: RequestOutput) -> bool:
            frame = make(choice, output)
            return not frame or write(frame)

        def tap(choice: int) -> Tap | None:
            around = self._around_text(choice)
            if around is None:
                return None
            (before, after), note_tokens = around, self._generation.timer.on_tokens

            def show(text: str) -> bool:
                note_tokens(1, choice)
                return write(before + encode_json(text) + after)

            return show

        await self._generation.forward(sink, tap)

    def abort(self) -> None:
        """The client has hung up."""
        self._generation.abort()

    def close(self) -> None:
        """Nobody reads any more."""
        self._generation.close()


@contextmanager
def client_watch(receive: Receive, on_gone: Callable[[], None]) -> Iterator[None]:
    """Calls `on_gone` if the client hangs up within the block. The body must have been read before."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


async def collect(receive: Receive, generation: Generation) -> list[list[RequestOutput]]:
    """All outputs of each choice, for an answer in one piece. Closes the generation.

    Raises ApiError if the generation fails, and ClientGone if the client hangs up.
    """
    outputs: list[list[RequestOutput]] = [[] for _ in range(generation.num_choices)]
    try:
        with client_watch(receive, generation.abort):
            async for choice, output in generation.outputs():
                outputs[choice].append(output)
    finally:
        generation.close()
    return outputs


class EventStream(Response):
    """Streams the frames of `source`.

    The response starts with the first frame, so a request that fails before it is answered with an error's status. A
    later failure ends the stream with an error event, which clients raise. Closes the source.

    Where the connection lets it (see `connections.DIRECT_WRITE`), frames after the first go straight to the socket as
    the engine gives them; the task sleeps until the reader falls behind or the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(self, source: FrameSource, end: StreamEnd = OPENAI_END) -> None:
        super().__init__()
        self._source = source
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        write: Callable[[bytes], bool] | None = scope.get("extensions", {}).get(DIRECT_WRITE, {}).get("write")
        with client_watch(receive, self._source.abort):
            try:
                async for frame in self._source.frames():
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": _HEADERS})
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                    if write is not None:
                        await self._source.forward(write)
                tail = self._end.done
            except ClientGone:
                tail = b""
            except Exception as failure:
                if not started:
                    raise
                tail = self._end.failed(as_api_error(failure))
            finally:
                self._source.close()
            if not started:
                await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": tail, "more_body": False})
