"""Answers, whole and as server-sent events: one frame an output, no faster than the client reads.

Back-pressure is the socket's: a send waits while the connection's write buffer is above its high-water mark
(64 KiB), and only then is the next output taken from the engine. What a stalled reader can hold back is therefore
that buffer and its own answer, which the engine bounds. A client that hangs up is aborted at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidewheel.engine.request import RequestOutput
from tidewheel.server.errors import ClientGone, as_api_error
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
    """Streams a generation's frames.

    The response starts with the first frame, so a request that fails before it is answered with an error's status. A
    later failure ends the stream with an error event, which OpenAI's clients raise. Closes the generation.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], generation: Generation) -> None:
        super().__init__()
        self._frames = frames
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        with client_watch(receive, self._generation.abort):
            try:
                async for frame in self._frames:
                    if not started:
                        started = True
                        await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": _HEADERS})
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                tail = DONE
            except ClientGone:
                tail = b""
            except Exception as failure:
                if not started:
                    raise
                tail = b"data: " + as_api_error(failure).body() + b"\n\n" + DONE
            finally:
                self._generation.close()
            if not started:
                await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": tail, "more_body": False})
