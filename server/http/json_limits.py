"""A limit on the values in the JSON of a request's body, counted before it is decoded.

Decoding blocks the event loop. Its time depends on the number of values, not of bytes: 10 million empty lists take
2.5 s, text of the same size 15 ms. So values are limited. Counting takes 3 ns a byte, piece by piece as they arrive.
"""

from __future__ import annotations

from http import HTTPStatus

import numpy as np
from numpy.typing import NDArray
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ApiError
from .forms import is_upload

MIN_VALUES = 2**20  # values that every server accepts; decoding them takes 20 to 30 ms
MAX_PARTS = 2**17  # objects, lists and fields, enough for 40,000 messages; decoding them takes 30 to 100 ms
LONGEST_NAME = 2**14  # bytes of a field's name, because msgspec repeats it in its errors

_COMMA, _COLON, _QUOTE, _LIST, _OBJECT = b',:"[{'


def values_limit(max_model_len: int) -> int:
    """How many values a request's JSON may have."""
    return max(2 * max_model_len, MIN_VALUES)


class JsonCounts:
    """Counts what is outside of strings in JSON that arrives in pieces. For invalid JSON the counts mean nothing."""

    def __init__(self) -> None:
        self.values = 0
        self.parts = 0
        self.longest_name = 0  # bytes, without escapes
        self._in_string = False
        self._offset = 0
        self._last_quotes = np.zeros(2, np.int64)  # where the last string began and ended
        self._kept = b""  # a backslash whose other half is in the next piece

    def add(self, piece: bytes) -> None:
        """Take in the next bytes."""
        # Once escapes are removed, each quote begins or ends a string. Pairs of backslashes must be removed first.
        text = self._kept + piece
        self._offset -= len(self._kept)
        if self._in_string and b'"' not in text:
            self._kept = b"\\" if (len(text) - len(text.rstrip(b"\\"))) % 2 else b""
            self._offset += len(text)
            return
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        self._kept = text[-1:] if text.endswith(b"\\") else b""
        characters = np.frombuffer(text, np.uint8)
        quotes = characters == _QUOTE
        inside = np.cumsum(quotes, dtype=np.uint8) & 1  # the sum may overflow: only its last bit is used
        outside = inside == self._in_string
        self.values += int(np.count_nonzero((characters == _COMMA) & outside))
        names = (characters == _COLON) & outside
        self.parts += int(np.count_nonzero(((characters == _LIST) | (characters == _OBJECT)) & outside))
        self._note_names(np.flatnonzero(names), np.flatnonzero(quotes))
        self._offset += len(text)
        if len(inside):
            self._in_string ^= bool(inside[-1])

    def excess(self, max_values: int) -> str | None:
        """The limit that is exceeded, in words: what the JSON must have at most."""
        if self.values > max_values:
            return f"{max_values} values, such as token ids; send several requests"
        if self.parts > MAX_PARTS:
            return f"{MAX_PARTS} objects, lists and fields of objects; send several requests, or text instead"
        if self.longest_name > LONGEST_NAME:
            return f"{LONGEST_NAME} bytes in a field's name"
        return None

    def _note_names(self, colons: NDArray[np.int64], quotes: NDArray[np.int64]) -> None:
        """Count the names, which end at `colons`, and measure them. `quotes` are where strings begin and end."""
        self.parts += len(colons)
        ends = np.concatenate([self._last_quotes, quotes + self._offset])
        self._last_quotes = ends[-2:]
        if len(colons):
            last = np.searchsorted(ends, colons + self._offset) - 1  # the quote before each colon
            self.longest_name = max(self.longest_name, int((ends[last] - ends[last - 1]).max()) - 1)


class JsonLimits:
    """Answers 413 to a body whose JSON has more values than any request needs, as soon as they have arrived.

    The limits are `max_values` values, MAX_PARTS objects, lists and fields, and names of LONGEST_NAME bytes.
    """

    def __init__(self, app: ASGIApp, max_values: int) -> None:
        self.app = app
        self._max_values = max_values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_upload(scope):
            await self.app(scope, receive, send)
            return
        counts: JsonCounts | None = None

        async def receive_counted() -> Message:
            nonlocal counts
            message = await receive()
            # A body that arrives in one piece is too short to have too many values.
            if message["type"] == "http.request" and (counts is not None or message.get("more_body")):
                counts = counts or JsonCounts()
                counts.add(message.get("body", b""))
                self._check(counts)
            return message

        await self.app(scope, receive_counted, send)

    def _check(self, counts: JsonCounts) -> None:
        if limit := counts.excess(self._max_values):
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body's JSON must have at most {limit}", code="body_too_large"
            )
