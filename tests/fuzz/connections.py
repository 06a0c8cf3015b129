"""Harness of HTTP connections: a client's bytes, in any pieces, on a transport that is a list."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast
from unittest.mock import patch

from fuzz.harness import Harness
from uvicorn import Config
from uvicorn.server import ServerState

from tidewheel.server.http import no_pipelining
from tidewheel.server.http.connections import connection_class
from tidewheel.server.http.limits import ConnectionLimits

MAX_AHEAD = 64
POST = b"POST /v1/completions?a=%20 HTTP/1.1\r\nhost: a\r\n"
REQUESTS = [
    b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET /b HTTP/1.1\r\nconnection: close\r\n\r\n",
    POST + b"content-length: 8\r\nexpect: 100-continue\r\n\r\n{\"a\": 1}" + POST + b"content-length: 2\r\n\r\n{}",
    POST + b"transfer-encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n4\r\n\r\n\r\n\r\n0\r\nx:\r\n\r\nGET / HTTP/1.0\r\n\r\n",
    POST + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 3\r\n\r\nabcHEAD / HTTP/1.1\r\n\r\n",
    b"\r\n\r\nCONNECT a:1 HTTP/1.1\r\n\r\n\x16\x03\x01",
    b"GET /%ff//b HTTP/1.1\r\n" + b"x: y\r\n" * 9 + b"\r\n",
    b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 9 + b"z\n",
]  # fmt: skip


class Transport(asyncio.Transport):
    """Takes what is written, and tells its protocol that it is closed as sockets do: later."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_paused = self._is_closing = False
        self._loop = loop

    def write(self, data: Any) -> None:
        assert isinstance(data, bytes)
        if not self._is_closing:
            self.written += data

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self.protocol.connection_lost, None)

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The answer's end. What the client sends until it closes is still read."""

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    protocol: asyncio.Protocol


async def answered(pieces: Iterable[bytes]) -> tuple[list[Any], bytes]:
    """The requests that reach the application, and what is written, up to a refusal."""
    requests: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        else:
            return
        requests.append((scope["method"], scope["path"], scope["query_string"], scope["headers"], body))
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    limits = ConnectionLimits(max_header_count=8, read_timeout_s=None, write_timeout_s=None)
    config = Config(cast(Any, app), ws="none", lifespan="off", log_config=None, access_log=False)
    loop = asyncio.get_running_loop()
    transport = Transport(loop)
    made: Any = connection_class(limits, direct_write=False)
    transport.protocol = protocol = made(config, ServerState(), {}, loop)
    protocol.connection_made(transport)

    async def settle() -> None:
        quiet, before = 0, None
        while quiet < 4:
            await asyncio.sleep(0)
            now = (len(transport.written), len(protocol._ahead), len(requests), transport.is_closing())
            quiet, before = (quiet + 1 if now == before else 0), now

    for piece in pieces:
        if transport.is_paused:
            await settle()
            assert not transport.is_paused, "it never reads on"
        if transport.is_closing():
            break
        protocol.data_received(piece)
        assert len(protocol._ahead) <= MAX_AHEAD + len(piece)
    await settle()
    if not transport.is_closing():
        if not protocol.eof_received():
            transport.close()  # as asyncio does
        await settle()
    assert transport.is_closing(), "it never ends"
    # Which of two mistakes a refusal is for depends on what the parser saw at once.
    answers, refused, _ = bytes(transport.written).partition(b"HTTP/1.1 4")
    return requests, answers + refused


def run(data: bytes) -> None:
    cuts = range(1, len(data), 1 + len(data) // 6)
    with (
        patch.object(no_pipelining, "_MAX_AHEAD", MAX_AHEAD),
        patch.object(no_pipelining, "_TURN", 512),
        asyncio.Runner() as runner,
    ):
        whole = runner.run(answered([data]))
        assert runner.run(answered(data[at : at + 1] for at in range(len(data)))) == whole
        for cut in cuts:
            assert runner.run(answered([data[:cut], data[cut:]])) == whole


CONNECTIONS = {"connection": Harness(run, REQUESTS)}
