"""The beginnings of a request's prompt, as numbers that proxies and replicas exchange.

The numbers are a chain: each stands for one more message, or for one more piece of a text or of tokens. So two requests
have the same number only if all before it is the same too. Prompts are not tokenized here: proxies have no model.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
_MAX_PARTS = 2048  # of a prompt that are looked at: proxies do nothing else meanwhile
_FIRST, _LAST = 4, 28  # of a chain's numbers that are kept
_SESSION_HEADERS = (b"x-session-id", b"x_session_id")  # as Serve reads it
_HELD = 2048
_CHAT = b"chat"
_TEXT = re.compile(rb"[0-9a-f]{16}")


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
        numbers = [*_chain(model or 0, islice(_parts(request), _MAX_PARTS))]
    except orjson.JSONEncodeError:  # it is nested deeper than orjson writes, but not than it reads
        numbers = []
    return Keys(
        session=session,
        model=model,
        prefixes=numbers if len(numbers) <= _FIRST + _LAST else numbers[:_FIRST] + numbers[-_LAST:],
        is_chat=bool(numbers) and any(_is_messages(request.get(name)) for name in ("messages", "input")),
    )


def _session(name: Any) -> int | None:
    if not isinstance(name, str) or not name:
        return None
    return hash_of(b"session " + name.encode("utf-8", "replace"))


def _is_messages(content: Any) -> bool:
    """Whether these are messages that a next turn begins with. A system prompt alone begins chats of others too."""
    if not isinstance(content, list) or not content or not isinstance(content[0], dict):
        return False
    last = content[-1]
    return isinstance(last, dict) and last.get("role") not in ("system", "developer")


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
    """Keys as a header's value: whether it is a chat, the session, the model, then the prefixes."""
    numbers = (keys.session, keys.model, *keys.prefixes)
    texts = (b"" if number is None else b"%016x" % number for number in numbers)
    return b",".join((_CHAT if keys.is_chat else b"", *texts))


def read_keys(value: bytes) -> Keys:
    """The keys that `write_keys` wrote. Anything else is no key."""
    most = _FIRST + _LAST + 3
    chat, session, model, *prefixes = [*value[: 17 * most].split(b",")[:most], b"", b"", b""]
    return Keys(
        session=_number(session),
        model=_number(model),
        prefixes=[number for text in prefixes if (number := _number(text)) is not None],
        is_chat=chat == _CHAT,
    )


def _number(text: bytes) -> int | None:
    return int(text, 16) if _TEXT.fullmatch(text) else None


class HeldPrefixes:
    """The prefixes that a replica computed last, for its routing statistics."""

    def __init__(self, most: int = _HELD) -> None:
        self._most = most
        self._numbers: OrderedDict[int, bool] = OrderedDict()  # whether it was all of a chat

    def add(self, keys: Keys) -> None:
        """Take note of a request."""
        for number in keys.prefixes:
            self._numbers[number] = self._numbers.pop(number, False)
        if keys.is_chat and keys.prefixes:
            self._numbers[keys.prefixes[-1]] = True
        while len(self._numbers) > self._most:
            self._numbers.popitem(last=False)

    def packed(self, others: Iterable[int] = ()) -> str:
        """These numbers and `others` as a text of 11 characters each: those that were all of a chat behind a dot."""
        whole = {number for number, is_whole in self._numbers.items() if is_whole}
        return ".".join(map(packed_numbers, ({*self._numbers, *others} - whole, whole)))


def packed_numbers(numbers: Collection[int]) -> str:
    """64-bit numbers as a text of 11 characters each."""
    return base64.b64encode(struct.pack(f"<{len(numbers)}Q", *sorted(numbers))).decode("ascii")


def unpacked_numbers(text: str) -> Sequence[int]:
    """The numbers of `packed_numbers`; none if it is not such a text."""
    try:
        data = base64.b64decode(text, validate=True)
        return struct.unpack(f"<{len(data) // 8}Q", data)
    except (binascii.Error, ValueError, struct.error):
        return ()


def unpacked(text: str) -> tuple[Sequence[int], Sequence[int]]:
    """The numbers of `packed`, and which of them were all of a chat; none of what is not such a text."""
    others, whole = map(unpacked_numbers, text.partition(".")[::2])
    return (*others, *whole), whole
