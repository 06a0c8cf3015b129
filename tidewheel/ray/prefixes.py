"""What a request's prompt begins with, as numbers that proxies and replicas exchange.

The numbers are a chain: each stands for one more message, or for one more piece of a text or of tokens. So two requests
have the same number only if all before it is the same too. Prompts are not tokenized here: proxies have no model.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import orjson

from .hash_ring import hash_of
from .policy import Keys

HEADER = b"x-tidewheel-prefix"
"""The request's header that has its keys, between proxies and replicas. Clients' own are dropped."""

LONGEST_BODY = 1 << 20
"""Bytes of a body that is looked at. Longer ones are routed by their session alone."""

_PIECE = 1024  # characters of a text
_TOKENS = 256  # of a prompt that is given as tokens; as many as such a text has
_MOST_PARTS = 2048  # of a prompt that are looked at: proxies do nothing else meanwhile
_FIRST, _LAST = 4, 28  # of a chain's numbers that are kept
_SESSION_HEADERS = (b"x-session-id", b"x_session_id")  # as Serve reads it
_HELD = 2048
_TEXT = re.compile(r"[0-9a-f]{16}")


def session_key(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The number of the session that headers name; None if they name none."""
    for name, value in headers:
        if name.lower() in _SESSION_HEADERS and value:
            return hash_of(b"session " + value)
    return None


def model_key(name: str) -> int:
    """The number of a model or adapter."""
    return hash_of(b"model " + name.encode("utf-8", "replace"))


def body_keys(body: bytes) -> Keys:
    """The keys of a request's JSON body, of any of the server's protocols. None are found in what is not one."""
    if len(body) > LONGEST_BODY:
        return Keys()
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Keys()
    if not isinstance(request, dict):
        return Keys()
    session = _session(request.get("prompt_cache_key"))
    name = request.get("model")
    model = model_key(name) if isinstance(name, str) and name else None
    try:
        numbers = [*_chain(model or 0, islice(_parts(request), _MOST_PARTS))]
    except orjson.JSONEncodeError:  # it is nested deeper than orjson writes, but not than it reads
        numbers = []
    return Keys(
        session=session,
        model=model,
        prefixes=numbers if len(numbers) <= _FIRST + _LAST else numbers[:_FIRST] + numbers[-_LAST:],
    )


def _session(name: Any) -> int | None:
    if not isinstance(name, str) or not name:
        return None
    return hash_of(b"session " + name.encode("utf-8", "replace"))


def _parts(request: Mapping[str, Any]) -> Iterator[bytes]:
    """A prompt in the pieces that it grows by."""
    head = [request.get(name) for name in ("tools", "system", "instructions")]
    if any(head):
        yield orjson.dumps(head)
    for name in ("messages", "input", "prompt"):
        content = request.get(name)
        if isinstance(content, str):
            yield from (
                content[begin : begin + _PIECE].encode("utf-8", "replace") for begin in range(0, len(content), _PIECE)
            )
        elif isinstance(content, list) and content and isinstance(content[0], int):
            yield from (orjson.dumps(content[begin : begin + _TOKENS]) for begin in range(0, len(content), _TOKENS))
        elif isinstance(content, list):
            yield from map(orjson.dumps, content)


def _chain(before: int, parts: Iterable[bytes]) -> Iterator[int]:
    for part in parts:
        before = hash_of(part, before)
        yield before


def write_keys(keys: Keys) -> bytes:
    """Keys as a header's value: the session, the model, then the prefixes."""
    numbers = (keys.session, keys.model, *keys.prefixes)
    return b",".join(b"" if number is None else b"%016x" % number for number in numbers)


def read_keys(value: bytes) -> Keys:
    """What `write_keys` wrote. Whatever else it is, is no key."""
    session, model, *prefixes = [*value[: 17 * (_FIRST + _LAST + 2)].decode("latin-1").split(","), ""][
        : _FIRST + _LAST + 2
    ]
    return Keys(
        session=_number(session),
        model=_number(model),
        prefixes=[number for text in prefixes if (number := _number(text)) is not None],
    )


def _number(text: str) -> int | None:
    return int(text, 16) if _TEXT.fullmatch(text) else None


class HeldPrefixes:
    """The prefixes that a replica computed last, for its routing statistics."""

    def __init__(self, most: int = _HELD) -> None:
        self._most = most
        self._numbers: OrderedDict[int, None] = OrderedDict()

    def add(self, keys: Keys) -> None:
        """Take note of a request."""
        for number in keys.prefixes:
            self._numbers[number] = None
            self._numbers.move_to_end(number)
        while len(self._numbers) > self._most:
            self._numbers.popitem(last=False)

    def packed(self, others: Iterable[int] = ()) -> str:
        """These numbers and `others` as a text of 11 characters each."""
        numbers = sorted({*self._numbers, *others})
        return base64.b64encode(struct.pack(f"<{len(numbers)}Q", *numbers)).decode("ascii")


def unpacked(text: str) -> Sequence[int]:
    """The numbers of `packed`; none if it is not such a text."""
    try:
        data = base64.b64decode(text, validate=True)
        return struct.unpack(f"<{len(data) // 8}Q", data)
    except (binascii.Error, struct.error):
        return ()
