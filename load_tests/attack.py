"""Attack: the bytes that a hostile client sends over one connection, and the allowed answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

JSON = "application/json"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

REFUSED = frozenset({400})
# A server may be able to serve the request, or may be overloaded.
SERVED_OR_REFUSED = frozenset({200, 400, 413, 429, 503, 504})
TOO_LARGE = frozenset({400, 413})
NO_FAILURE = frozenset({*range(200, 500), 501, 503, 504})


class Attack(NamedTuple):
    """What a hostile client sends, and the statuses that it may be answered with.

    If it does not read (`reads`), it disconnects a while later. If it `half_closes`, it closes its sending side.
    """

    name: str
    sent: bytes
    allowed: frozenset[int]
    reads: bool = True
    half_closes: bool = False


Kinds = Sequence[tuple[float, Callable[[random.Random], Attack]]]
"""Kinds of attacks: how often each is drawn, and what makes one."""


class Wire:
    """Writes requests to a server at `host`, as bytes of a connection that ends with the answer."""

    def __init__(self, host: str, api_key: str | None = None) -> None:
        self.head = f"host: {host}\r\nconnection: close\r\n"
        if api_key:
            self.head += f"authorization: Bearer {api_key}\r\n"

    def get(self, path: str, method: str = "GET", headers: str = "") -> bytes:
        """A request without a body."""
        return f"{method} {path} HTTP/1.1\r\n{self.head}{headers}\r\n".encode()

    def request(self, path: str, content: bytes, content_type: str = JSON, method: str = "POST") -> bytes:
        """A request with a body."""
        own = f"content-type: {content_type}\r\ncontent-length: {len(content)}\r\n"
        return self.get(path, method, own) + content

    def post(
        self, name: str, path: str, body: Mapping[str, Any], allowed: frozenset[int], content_type: str = JSON
    ) -> Attack:
        """An attack with a JSON body."""
        return Attack(name, self.request(path, json.dumps(body).encode(), content_type), allowed)


def new_word(rng: random.Random) -> str:
    """A word that no earlier request had, so that no answer comes from a cache."""
    return f"w{rng.getrandbits(48):x}"
