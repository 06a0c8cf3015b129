"""Connections with malformed or excessive HTTP, such as known attacks on proxies and servers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from attack import CHAT, COMPLETIONS, JSON, NO_FAILURE, Attack, Kinds, Wire, new_word

_BODY = b'{"prompt": "a", "max_tokens": 1}'
_BAD = frozenset({400, 408, 411, 413, 414, 415, 431, 501})
_CHUNKED = "transfer-encoding: chunked\r\n"
_WEIGHT = 1.0


def http_attacks(wire: Wire) -> Kinds:
    """One kind of attack for each shape."""
    length = f"content-length: {len(_BODY)}\r\n"
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_BODY), _BODY)
    smuggled = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nhost: a\r\n\r\n"
    shapes: Sequence[tuple[str, str, bytes, frozenset[int]]] = (
        # Requests that two servers in a chain may parse differently.
        ("two lengths", f"content-length: 0\r\n{length}", _BODY, _BAD),
        ("a list of lengths", f"content-length: {len(_BODY)}, 0\r\n", _BODY, _BAD),
        ("length and chunks", f"{length}{_CHUNKED}", smuggled, _BAD),
        ("chunks and length", f"{_CHUNKED}{length}", smuggled, _BAD),
        ("chunked twice", f"{_CHUNKED}{_CHUNKED}", chunk, NO_FAILURE),
        ("chunked in a list", "transfer-encoding: chunked, identity\r\n", smuggled, _BAD),
        ("almost chunked", "transfer-encoding: xchunked\r\n", smuggled, _BAD),
        ("chunked after a tab", "transfer-encoding:\tchunked\r\n", chunk, NO_FAILURE),
        ("space before colon", "transfer-encoding : chunked\r\n", smuggled, _BAD),
        ("folded header", "transfer-encoding:\r\n chunked\r\n", chunk, NO_FAILURE),
        ("length with sign", f"content-length: +{len(_BODY)}\r\n", _BODY, _BAD),
        ("length below zero", "content-length: -1\r\n", _BODY, _BAD),
        ("length in hex", "content-length: 0x10\r\n", _BODY, _BAD),
        ("length without end", f"content-length: {'9' * 40}\r\n", _BODY, _BAD),
        ("no length", "", _BODY, NO_FAILURE),
        # Chunks.
        ("chunk size that is none", _CHUNKED, b"zz\r\n" + _BODY + b"\r\n0\r\n\r\n", _BAD),
        ("chunk size below zero", _CHUNKED, b"-1\r\n" + _BODY + b"\r\n0\r\n\r\n", _BAD),
        ("chunk size that overflows", _CHUNKED, b"f" * 17 + b"\r\n" + _BODY, _BAD),
        ("chunk longer than its size", _CHUNKED, b"2\r\n" + _BODY + b"\r\n0\r\n\r\n", _BAD),
        ("long chunk extension", _CHUNKED, b"1;" + b"a" * 100_000 + b"\r\n{\r\n0\r\n\r\n", NO_FAILURE),
        ("chunks of a byte", _CHUNKED, b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n", NO_FAILURE),
        ("trailers", _CHUNKED, chunk[:-2] + b"content-length: 9\r\nx-a: b\r\n\r\n", NO_FAILURE),
        ("many trailers", _CHUNKED, chunk[:-2] + b"a: b\r\n" * 50_000 + b"\r\n", NO_FAILURE),
        # Request heads.
        ("long header", f"{length}x-long: {'a' * 70_000}\r\n", _BODY, _BAD),
        ("many headers", length + "a: b\r\n" * 300, _BODY, _BAD),
        ("header with NUL", f"{length}x-a: b\0c\r\n", _BODY, _BAD),
        ("header without name", f"{length}: b\r\n", _BODY, _BAD),
        ("header that is no text", f"{length}x-request-id: \xff\xfe\r\n", _BODY, NO_FAILURE),
        ("zipped body", f"{length}content-encoding: gzip\r\n", _BODY, NO_FAILURE),
        ("strange accept", f"{length}accept: {'*/*;q=0.1,' * 2000}\r\n", _BODY, NO_FAILURE),
        ("range", f"{length}range: bytes={'0-1,' * 2000}\r\n", _BODY, NO_FAILURE),
    )
    lines: Sequence[tuple[str, str]] = (
        ("websocket", "GET /v1/chat/completions HTTP/1.1"), ("websocket of the page", "GET / HTTP/1.1"),
        ("whole address", "GET http://elsewhere/health HTTP/1.1"), ("connect", "CONNECT elsewhere:443 HTTP/1.1"),
        ("options", "OPTIONS * HTTP/1.1"), ("trace", "TRACE / HTTP/1.1"), ("head", "HEAD /v1/models HTTP/1.1"),
        ("put", f"PUT {CHAT} HTTP/1.1"), ("unknown method", "BREW /health HTTP/1.1"),
        ("long address", f"GET /{'a' * 60_000} HTTP/1.1"), ("long query", f"GET /health?{'a=b&' * 15_000} HTTP/1.1"),
        ("page outside", "GET /web/../../../../etc/passwd HTTP/1.1"),
        ("escaped page outside", "GET /web%2f..%2f..%2f..%2fetc%2fpasswd HTTP/1.1"),
        ("address with NUL", "GET /v1/models/%00 HTTP/1.1"), ("bad escapes", "GET /v1/models/%zz%f HTTP/1.1"),
        ("docs", "GET /docs/../openapi.json HTTP/1.1"), ("HTTP/2", "PRI * HTTP/2.0"),
    )  # fmt: skip
    upgrade = "upgrade: websocket\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"
    return [
        *((_WEIGHT, partial(_shape, wire, *shape)) for shape in shapes),
        *((_WEIGHT, partial(_line, name, f"{line}\r\n{wire.head}{upgrade}\r\n")) for name, line in lines),
        (_WEIGHT, partial(_line, "bare line ends", f"GET /health HTTP/1.1\n{wire.head}\n".replace("\r", ""))),
        (_WEIGHT, partial(_expecting, wire)),
        (_WEIGHT, partial(_stopped_upload, wire)),
        (_WEIGHT, partial(_stopped_head, wire)),
    ]


def _shape(wire: Wire, name: str, headers: str, content: bytes, allowed: frozenset[int], rng: random.Random) -> Attack:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\n{wire.head}content-type: {JSON}\r\n{headers}\r\n"
    return Attack(name, head.encode("latin-1") + content, allowed)


def _line(name: str, sent: str, rng: random.Random) -> Attack:
    return Attack(name, sent.encode(), NO_FAILURE)


def _expecting(wire: Wire, rng: random.Random) -> Attack:
    """Waits for the server's `100 Continue` before it sends its body, and then sends none."""
    headers = f"expect: 100-continue\r\ncontent-type: {JSON}\r\ncontent-length: 100\r\n"
    return Attack("expects to go on", wire.get(COMPLETIONS, "POST", headers), frozenset(), reads=False)


def _stopped_upload(wire: Wire, rng: random.Random) -> Attack:
    part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="%b"\r\n\r\n' % new_word(rng).encode()
    whole = wire.request("/v1/files", part + b"{}\n" * 100_000 + b"\r\n--b--\r\n", "multipart/form-data; boundary=b")
    return Attack("stopped upload", whole[: -rng.randint(1, 100_000)], frozenset(), reads=False)


def _stopped_head(wire: Wire, rng: random.Random) -> Attack:
    whole = wire.get("/v1/models", headers=f"x-a: {'a' * 1000}\r\n")
    return Attack("stopped head", whole[: -rng.randint(1, 1000)], frozenset(), reads=False)
