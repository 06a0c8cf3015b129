"""The additions to Serve's proxies, with a scripted application in Serve's place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidewheel.ray.prefixes import HEADER, body_keys, read_keys
from tidewheel.ray.proxy import ProxyMiddleware

BODY = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "prompt_cache_key": "k"}).encode()
START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
EVENT: Message = {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


class Replicas:
    """Answers each attempt as it was told, and takes note of what it got."""

    def __init__(self, *attempts: Sequence[Message]) -> None:
        self.attempts = [*attempts]
        self.bodies: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers.append(dict(scope["headers"]))
        body, more = b"", scope["method"] == "POST"
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        for message in self.attempts.pop(0):
            await send(message)


def ask(
    app: ASGIApp,
    pieces: Sequence[bytes] = (BODY,),
    path: str = "/v1/chat/completions",
    method: str = "POST",
    **headers: str,
) -> list[Message]:
    sent: list[Message] = []
    messages: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": i < len(pieces) - 1} for i, piece in enumerate(pieces)
    ]

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    named = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": named, "state": {}}
    asyncio.run(ProxyMiddleware(app)(scope, receive, send))
    return sent


def test_keys_are_those_of_the_body() -> None:
    replicas = Replicas([START, EVENT, END])
    assert ask(replicas, [BODY[:10], BODY[10:]], x_tidewheel_prefix="0123456789abcdef,") == [START, EVENT, END]
    assert replicas.bodies == [BODY]
    assert read_keys(replicas.headers[0][HEADER]) == body_keys(BODY)


def test_the_session_of_a_header_goes_first() -> None:
    replicas = Replicas([START, END])
    ask(replicas, x_session_id="mine")
    assert read_keys(replicas.headers[0][HEADER]).session is None  # the router reads the session from the header


def test_a_request_that_got_nothing_is_repeated() -> None:
    replicas = Replicas([], [START, EVENT, END])
    assert ask(replicas) == [START, EVENT, END]
    assert replicas.bodies == [BODY, BODY]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_request_without_a_body_is_repeated_too(method: str) -> None:
    replicas = Replicas([], [START, END])
    assert ask(replicas, [b""], "/v1/models", method) == [START, END]
    assert all(HEADER not in headers for headers in replicas.headers)


def test_clients_do_not_command_serve() -> None:
    replicas = Replicas([START, END])
    ask(
        replicas,
        x_request_disconnect_disabled="?1",
        x_request_timeout_seconds="0",
        serve_multiplexed_model_id="one of many",
        x_tidewheel_prefix="0123456789abcdef,",
        x_request_id="x" * 101,
        accept="text/event-stream",
    )
    assert [name for name in replicas.headers[0] if name != HEADER] == [b"accept"]


def test_serve_can_read_the_headers_that_it_reads() -> None:
    replicas = Replicas([START, END])
    ask(replicas, x_session_id="h\xe9", traceparent="\xff", x_request_id="\xe9", x_other="\xe9")
    headers = {name: value for name, value in replicas.headers[0].items() if name != HEADER}
    assert headers == {
        b"x-session-id": "h\xe9".encode(),
        b"traceparent": "\xff".encode(),
        b"x-other": b"\xe9",  # which is the application's
    }


def test_it_is_not_repeated_for_ever() -> None:
    replicas = Replicas([], [], [])
    start, body = ask(replicas)
    assert (start["status"], dict(start["headers"])[b"retry-after"]) == (503, b"1")
    assert json.loads(body["body"])["error"]["code"] == "replica_lost"


def test_a_long_body_is_passed_on_and_not_repeated() -> None:
    pieces = [b"x" * (600 << 10)] * 4
    replicas = Replicas([])
    start, _ = ask(replicas, pieces)
    assert (start["status"], replicas.bodies) == (503, [b"".join(pieces)])
    assert read_keys(replicas.headers[0][HEADER]).prefixes == []


@pytest.mark.parametrize(
    ("path", "content_type", "event"),
    [
        ("/v1/chat/completions", "text/event-stream", b'data: {"error":{'),
        ("/v1/messages", "text/event-stream; charset=utf-8", b'event: error\ndata: {"type":"error","error":{'),
        ("/v1/responses", "text/event-stream", b'event: error\ndata: {"type":"error",'),
        ("/api/chat", "application/x-ndjson", b'{"error":"the replica'),
    ],
)
def test_a_broken_stream_ends_with_an_error(path: str, content_type: str, event: bytes) -> None:
    start = {**START, "headers": [(b"content-type", content_type.encode())]}
    sent = ask(Replicas([start, EVENT]), path=path)
    assert sent[:2] == [start, EVENT]
    assert sent[2]["body"].startswith(event)
    assert b"replica" in sent[2]["body"]
    assert not sent[2]["more_body"]


def test_another_broken_answer_is_left_open() -> None:
    """So that the connection is closed too early, which a client notices."""
    start: dict[str, Any] = {**START, "headers": [(b"content-type", b"application/json")]}
    assert ask(Replicas([start, EVENT])) == [start, EVENT]
