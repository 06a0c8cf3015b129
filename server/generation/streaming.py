"""Answers on their way to clients: as an event stream, no faster than the client reads, or in one piece.

Back-pressure is the socket's: while the connection's write buffer is above its high-water mark (64 KiB), the source is
paused. What a stalled reader can hold back is therefore that buffer and its own answer, which the engine bounds. A
client that hangs up is aborted at once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import ClassVar, Generic, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidewheel.engine.core.stream import Sink
from tidewheel.engine.outputs import RequestOutput

from ..client_watch import client_watch
from ..errors import ApiError, ClientGone, as_api_error
from ..http.connections import DIRECT_WRITE
from .frames import DONE
from .generations import Generation

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect frames otherwise
]
_EVENTS = b"text/event-stream; charset=utf-8"

EVENT_STREAM_HEADERS = [(b"content-type", _EVENTS), *_HEADERS]
"""Of an answer that consists of events."""


class Source(Protocol[T_co]):
    """An event stream's source, such as a Generation: aborted if the client hangs up, closed in any case."""

    def read(self, sink: Sink[T_co], /) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


async def feed(receive: Receive, generation: Generation, push: Callable[[RequestOutput], None]) -> None:
    """Calls `push` with all outputs as they come, for an answer in one piece. Closes the generation.

    Raises ApiError if the generation fails, and ClientGone if the client hangs up.
    """
    try:
        with client_watch(receive, generation.abort):
            await generation.feed(push)
    finally:
        generation.close()


async def collect(receive: Receive, generation: Generation) -> list[list[RequestOutput]]:
    """All outputs of each choice. As `feed`."""
    outputs: list[list[RequestOutput]] = [[] for _ in generation.choices]
    await feed(receive, generation, lambda output: outputs[output.index].append(output))
    return outputs


class EventStream(Response, ABC, Generic[T]):
    """Streams what `source` pushes, as frames that a subclass makes of it. Closes the source.

    The frames are `first_frame`, a `frame` for each item, `last_frames` and `done`, and `failed` is the last one of a
    stream that breaks off. All may be empty; those here are OpenAI's.

    The response starts with the first frame, so a request that fails before it is answered with an error's status. A
    later failure ends the stream with an error event, which clients raise.

    Where the connection lets it (see `connections.DIRECT_WRITE`), frames after the first go straight to the socket as
    they are pushed; the task sleeps until the reader falls behind or the stream ends.
    """

    __slots__ = ("_failure", "_has_ended", "_has_started", "_held", "_news", "_source", "_write")  # near each other

    media_type = "text/event-stream"
    content_type: ClassVar[bytes] = _EVENTS
    done: ClassVar[bytes] = DONE

    def __init__(self, source: Source[T]) -> None:
        super().__init__()
        self._source = source
        self._write: Callable[[bytes], bool] | None = None  # None: the task sends what is held
        self._held: Iterable[bytes] = ()
        self._has_ended = False
        self._failure: Exception | None = None
        self._news = asyncio.Event()  # for the task: the source was paused, or has ended
        self._has_started = False

    def first_frame(self) -> bytes:
        """What comes before the first item."""
        return b""

    @abstractmethod
    def frame(self, item: T) -> bytes | Iterator[bytes]:
        """An item's frames; an iterator if they are large, so that others have their turn between them."""

    async def before_last(self) -> None:
        """Waits for what the last frames stand for. What it raises breaks the stream off."""

    def last_frames(self) -> Iterable[bytes]:
        """The frames after the last item; others have their turn between them."""
        return ()

    def failed(self, error: ApiError) -> bytes:
        """How a stream breaks off that has begun."""
        return error.event() + DONE

    def push(self, item: T) -> None:
        """See Sink."""
        frame = self.frame(item)
        if not isinstance(frame, bytes):
            self._held = frame
        elif self._write is None and frame:
            self._held = (frame,)
        elif self._write is None or not frame or self._write(frame):
            return
        self._source.pause()
        self._news.set()

    def end(self, failure: Exception | None) -> None:
        """See Sink."""
        self._has_ended, self._failure = True, failure
        self._news.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with client_watch(receive, self._source.abort):
            try:
                await self._stream(scope, send)
                tail = self.done
            except ClientGone as gone:
                gone.__traceback__ = None  # whose frames know it: only a collection of garbage could free them
                tail = b""
            except Exception as failure:
                if not self._has_started:
                    raise
                tail = self.failed(as_api_error(failure))
            finally:
                self._source.close()
            await self._send(send, tail, is_last=True)

    async def _stream(self, scope: Scope, send: Send) -> None:
        write: Callable[[bytes], bool] | None = scope.get("extensions", {}).get(DIRECT_WRITE, {}).get("write")
        if first := self.first_frame():
            await self._send(send, first)
        self._source.read(self)
        while True:
            await self._news.wait()
            self._news.clear()
            has_ended, held, self._held = self._has_ended, self._held, ()
            if not held and not has_ended:
                held = (b"",)  # sending nothing waits for the reader too
            for frame in held:
                await self._send(send, frame)
                await asyncio.sleep(0)
            if has_ended:
                break
            if write is not None and self._has_started:
                self._write = write
            self._source.resume()
        if self._failure is not None:
            raise self._failure
        await self.before_last()
        for frame in self.last_frames():
            await self._send(send, frame)
            await asyncio.sleep(0)

    async def _send(self, send: Send, frame: bytes, *, is_last: bool = False) -> None:
        if not self._has_started:
            self._has_started = True
            headers = [(b"content-type", self.content_type), *_HEADERS]
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": headers})
        await send({"type": "http.response.body", "body": frame, "more_body": not is_last})
