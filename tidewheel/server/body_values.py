"""How many values the JSON of a request's body may have, counted before it is decoded.

Decoding keeps the event loop from all else, for as long as the body has values: 10 million empty lists take 2.5 s, as
much text 15 ms. So it is not the bytes that have to be few. Counting takes 3 ns a byte, piece by piece as they come in.
"""

from __future__ import annotations

from http import HTTPStatus

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidewheel.server.errors import ApiError

LEAST_VALUES = 2**20  # that any server takes; they take 20 to 30 ms
MOST_PARTS = 2**17  # objects, lists and the fields of objects, which take 30 to 100 ms: 40,000 messages

_COMMA, _COLON, _QUOTE, _LIST, _OBJECT = b',:"[{'


class JsonCounts:
    """Counts what is between strings in JSON that comes in pieces. JSON that is none gives counts of no meaning."""

    def __init__(self) -> None:
        self.values = 0
        self.parts = 0
        self._in_string = False
        self._kept = b""  # a backslash whose other half is in the next piece

    def add(self, piece: bytes) -> None:
        """Take in the next bytes."""
        # Without what is escaped, each quote begins a string or ends one. Backslashes come in pairs first.
        text = (self._kept + piece).replace(b"\\\\", b"").replace(b'\\"', b"")
        self._kept = text[-1:] if text.endswith(b"\\") else b""
        characters = np.frombuffer(text, np.uint8)
        inside = np.cumsum(characters == _QUOTE, dtype=np.uint8) & 1  # it may wrap: only the last bit counts
        outside = inside == self._in_string
        self.values += int(np.count_nonzero((characters == _COMMA) & outside))
        opening = (characters == _LIST) | (characters == _OBJECT) | (characters == _COLON)
        self.parts += int(np.count_nonzero(opening & outside))
        if len(inside):
            self._in_string ^= bool(inside[-1])


class BodyValues:
    """Answers 413 to a body whose JSON has more values than any request needs, while it comes in.

    That are `max_values` values, and MOST_PARTS objects, lists and fields of objects.
    """

    def __init__(self, app: ASGIApp, max_values: int) -> None:
        self.app = app
        self._max_values = max_values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        counts: JsonCounts | None = None

        async def receive_counted() -> Message:
            nonlocal counts
            message = await receive()
            # A body that comes in one piece is too short to have too many.
            if message["type"] == "http.request" and (counts is not None or message.get("more_body")):
                counts = counts or JsonCounts()
                counts.add(message.get("body", b""))
                self._check(counts)
            return message

        await self.app(scope, receive_counted, send)

    def _check(self, counts: JsonCounts) -> None:
        if counts.values > self._max_values:
            limit = f"{self._max_values} values, such as token ids; send several requests"
        elif counts.parts > MOST_PARTS:
            limit = f"{MOST_PARTS} objects, lists and fields of objects; send several requests, or text instead"
        else:
            return
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body's JSON must have at most {limit}", code="body_too_large"
        )
