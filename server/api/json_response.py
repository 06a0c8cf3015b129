"""Structs as JSON responses: in one piece, or in parts where an answer may be large."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from itertools import islice
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..client_watch import client_watch
from ..generation.frames import encode_json

_LARGE = 2**18  # bytes; a larger answer is sent as it is written
_TURN_S = 0.004  # of writing, before others have their turn
_ITEMS_AT_ONCE = 64

HOLE: Any = msgspec.Raw(b"\0")  # JSON never has this byte
"""Stands in a payload for what `filled` puts there."""


def json_response(payload: msgspec.Struct | Sequence[object]) -> Response:
    """`payload` with status 200."""
    return Response(encode_json(payload), media_type="application/json")


def filled(payload: msgspec.Struct, *holes: Iterable[bytes]) -> Iterator[bytes]:
    """Parts of the JSON of `payload`, with what goes into each HOLE, in the order of its fields."""
    first, *rest = encode_json(payload).split(b"\0")
    yield first
    for hole, text in zip(holes, rest, strict=True):
        yield from hole
        yield text


def listed(items: Iterable[object], at_once: int = _ITEMS_AT_ONCE) -> Iterator[bytes]:
    """Parts of the JSON of a list, `at_once` items each."""
    remaining, before = iter(items), b"["
    while some := list(islice(remaining, at_once)):
        yield before + encode_json(some)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


class JsonParts(Response):
    """A JSON response, with status 200, that `parts` are joined to.

    Parts are made for a few milliseconds at a time, so that streams continue meanwhile. An answer larger than _LARGE is
    sent while it is made, no faster than the client reads. HTTP/1.0 clients get it in one piece, because they have to
    be told the length first.
    """

    media_type = "application/json"

    def __init__(self, parts: Iterator[bytes]) -> None:
        super().__init__()
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.Event()
        most = None if scope.get("http_version") == "1.0" else _LARGE
        with client_watch(receive, gone.set):
            body = await self._next(most)
            if most is None or len(body) < most:
                await Response(body, media_type=self.media_type)(scope, receive, send)
                return
            head = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": head})
            while body and not gone.is_set():
                await send({"type": "http.response.body", "body": body, "more_body": True})
                body = await self._next(most)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, most: int | None) -> bytes:
        """The next `most` bytes or a few more; fewer only at the end."""
        clock, gathered = asyncio.get_running_loop().time, bytearray()
        began = clock()
        for part in self._parts:
            gathered += part
            if most is not None and len(gathered) >= most:
                break
            if clock() - began > _TURN_S:
                await asyncio.sleep(0)
                began = clock()
        return bytes(gathered)
