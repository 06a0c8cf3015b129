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

from tidewheel.engine.request import RequestOutput
from tidewheel.server.errors import ApiError, ClientGone, as_api_error
from tidewheel.server.generation import Generation

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


class Abortable(Protocol):
    """What a stream reads from: it is aborted if the client hangs up, and closed in any case."""

    def abort(self) -> None: ...

    def close(self) -> None: ...


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
    """Streams frames that are made from `source`.

    The response starts with the first frame, so a request that fails before it is answered with an error's status. A
    later failure ends the stream with an error event, which clients raise. Closes the source.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], source: Abortable, end: StreamEnd = OPENAI_END) -> None:
        super().__init__()
        self._frames = frames
        self._source = source
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        with client_watch(receive, self._source.abort):
            try:
                async for frame in self._frames:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": _HEADERS})
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
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
