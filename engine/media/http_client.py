"""One HTTP GET to an address that was checked: nothing is resolved again, followed, decompressed or remembered."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import NamedTuple

import httptools

from .errors import FetchError

_MAX_HEAD_BYTES = 2**16
_CHUNK_BYTES = 2**16


class Target(NamedTuple):
    """What to get: `host` is its name in lower case, and `path` begins with a slash."""

    is_tls: bool
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The host as the header has it."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == (443 if self.is_tls else 80) else f"{name}:{self.port}"


class Response(NamedTuple):
    """A response's status, where it redirects to, and its body."""

    status: int
    location: str | None
    body: bytes


async def get(
    target: Target, address: str, tls: ssl.SSLContext | None, *, connect_s: float, max_bytes: int
) -> Response:
    """The response of the server at `address`, to which `target` was resolved. `tls` is needed for https.

    The body of a response other than 200 is not read. Raises FetchError and OSError, and asyncio.TimeoutError if there
    is no connection after `connect_s`. The caller bounds the rest of the time.
    """
    connecting = asyncio.open_connection(
        address,
        target.port,
        limit=_CHUNK_BYTES,
        ssl=tls if target.is_tls else None,
        server_hostname=target.host if target.is_tls else None,
    )
    reader, writer = await asyncio.wait_for(connecting, connect_s)
    try:
        writer.write(
            f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\nUser-Agent: tidewheel\r\nAccept: image/*\r\n"
            "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
        )
        parsing = _Parsing(max_bytes)
        while not parsing.is_done:
            parsing.feed(await reader.read(_CHUNK_BYTES))
        return Response(parsing.status, parsing.location, b"".join(parsing.body))
    finally:
        with contextlib.suppress(OSError, RuntimeError):
            writer.transport.abort()  # without TLS's farewell, for which a server may let one wait


class _Parsing:
    """What httptools calls with the parts of a response."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._num_head_bytes = 0
        self._num_bytes = 0
        self._headers: dict[bytes, bytes] = {}
        self._error: FetchError | None = None
        self.status = 0
        self.location: str | None = None
        self.body: list[bytes] = []
        self.is_done = False

    def feed(self, data: bytes) -> None:
        """Take what was received; nothing at its end. Raises FetchError."""
        if not data:
            if not self.status or {b"content-length", b"transfer-encoding"} & self._headers.keys():
                raise FetchError("the server has closed the connection too early")
            self.is_done = True
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise self._error or FetchError("the server does not speak HTTP") from error
        if self._error is not None:
            raise self._error
        if not self.status:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                raise FetchError("the server sends too many headers")

    def on_message_begin(self) -> None:
        self._headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # the real one follows
            return
        self.status = status
        if status != 200:
            self.location = self._headers.get(b"location", b"").decode("ascii", "replace") or None
            self.is_done = True
            return
        length = self._headers.get(b"content-length", b"0")
        if self._headers.get(b"content-encoding", b"identity").lower() != b"identity":
            self._error = FetchError("the server compresses it, which was not asked for")
        elif length.isdigit() and int(length[:20]) > self._max_bytes:
            self._refuse_size()

    def on_body(self, data: bytes) -> None:
        if self.status != 200 or self._error is not None:
            return
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            self._refuse_size()
        else:
            self.body.append(data)

    def on_message_complete(self) -> None:
        self.is_done = self.status != 0

    def _refuse_size(self) -> None:
        self._error = FetchError(f"it has more than {self._max_bytes} bytes")
