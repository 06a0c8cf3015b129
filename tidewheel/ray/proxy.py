"""Additions to Serve's HTTP proxies: they find a prompt's prefix for the router, and answer if a replica dies.

RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=tidewheel.ray.proxy.middlewares installs it; `tidewheel serve` does so by
itself when it starts Ray. Serve's routers see only the head of a request, so its keys are put there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from http import HTTPStatus

import orjson
from msgspec.structs import replace
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidewheel.server.errors import ApiError, error_response
from tidewheel.server.generation.frames import DONE
from tidewheel.server.http.middleware import is_request_id

from .policy import Keys
from .prefixes import HEADER, LONGEST_BODY, body_keys, session_key, write_keys

logger = logging.getLogger("ray.serve")

_ATTEMPTS = 3  # for a request whose replica died before it had sent anything
_RETRY_AFTER_S = 1
# Serve obeys these headers of clients. The first keeps a request running when its client has gone, the second lifts the
# time limit of http_options, and of each name in the third a proxy keeps something for ever.
_OF_SERVE = (b"x-request-disconnect-disabled", b"x-request-timeout-seconds", b"serve-multiplexed-model-id")
_READ_BY_SERVE = (b"x-session-id", b"traceparent", b"tracestate")  # as UTF-8, or else the request fails


def middlewares() -> list[Middleware]:
    """What Serve's callback returns."""
    return [Middleware(ProxyMiddleware)]


class ProxyMiddleware:
    """Reads a request's beginning for its keys, repeats it if its replica dies, and ends broken streams with an error.

    A body of up to 1 MiB is kept until its response begins. A longer one is passed on as it comes: its only key is the
    session's, and it is not repeated. Headers that would let clients command Serve are left out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        scope["headers"] = [*_of_clients(scope["headers"])]
        await body.read()
        if scope["method"] == "POST":
            keys = body_keys(body.content) if body.is_whole else Keys()
            if session_key(scope["headers"]) is not None:  # which the router sees
                keys = replace(keys, session=None)
            scope["headers"].append((HEADER, write_keys(keys)))
        for attempt in range(_ATTEMPTS):
            answer = _Answer(scope, send)
            begun = {**scope, "headers": [*scope["headers"]]}  # Serve adds to it
            try:
                await self._app(begun, body.receive, answer.send)
            except Exception as error:  # any error of Serve: the client gets an answer
                logger.warning("A request failed in Serve's proxy: %r", error)
            if answer.has_ended or body.is_gone:
                return
            if answer.has_begun or not body.is_whole or attempt == _ATTEMPTS - 1:
                await answer.fail()
                return
            logger.warning("The replica of a request ended before it had answered: asking another one")
            body.rewind()


def _of_clients(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """The headers of a request to pass on: Serve must be able to read them, and obeys only its operator."""
    for name, value in headers:
        plain = name.lower().replace(b"_", b"-")  # as Serve compares them
        if plain == HEADER or plain in _OF_SERVE:
            continue
        if plain == b"x-request-id" and not is_request_id(value.decode("latin-1")):
            continue
        yield name, _as_utf8(value) if plain in _READ_BY_SERVE else value


def _as_utf8(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value


class _Body:
    """A request's body. Its beginning is read ahead."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ahead: list[Message] = []
        self._next = 0
        self.content = b""
        self.is_whole = False
        self.is_gone = False

    async def read(self) -> None:
        """Read all of it, or LONGEST_BODY bytes."""
        pieces, size = [], 0
        while not self.is_whole and not self.is_gone and size <= LONGEST_BODY:
            message = await self._receive()
            self._ahead.append(message)
            self.is_gone = message["type"] == "http.disconnect"
            if message["type"] == "http.request":
                pieces.append(message.get("body", b""))
                size += len(pieces[-1])
                self.is_whole = not message.get("more_body", False)
        self.content = b"".join(pieces)

    async def receive(self) -> Message:
        """The messages that were read ahead, then those that come."""
        if self._next < len(self._ahead):
            self._next += 1
            return self._ahead[self._next - 1]
        message = await self._receive()
        self.is_gone = self.is_gone or message["type"] == "http.disconnect"
        return message

    def rewind(self) -> None:
        """Begin again with what was read ahead."""
        self._next = 0


class _Answer:
    """What of an answer was sent."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._content_type = b""
        self.has_begun = False
        self.has_ended = False

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            self._content_type = dict(message["headers"]).get(b"content-type", b"")
        elif message["type"] == "http.response.body":
            self.has_ended = not message.get("more_body", False)
        await self._send(message)

    async def fail(self) -> None:
        """Tell the client that its answer will not come: by an error, or by an event if a stream has begun."""
        error = ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the replica that computed this answer has ended; send the request again",
            code="replica_lost",
            headers={"retry-after": str(_RETRY_AFTER_S)},
        )
        if not self.has_begun:
            await error_response(error)(self._scope, _nothing, self._send)
        elif self._content_type.startswith((b"text/event-stream", b"application/x-ndjson")):
            await self._send({"type": "http.response.body", "body": self._event(error), "more_body": False})
        # else the connection is closed before its end, which a client notices

    def _event(self, error: ApiError) -> bytes:
        path = self._scope["path"]
        if self._content_type.startswith(b"application/x-ndjson"):
            return error.ollama_body() + b"\n"
        if path.endswith("/messages"):
            return error.anthropic_event()
        if path.endswith("/responses"):
            whole = {"type": "error", "code": error.code, "message": error.message, "param": None}
            return b"event: error\ndata: " + orjson.dumps({**whole, **orjson.loads(error.body())}) + b"\n\n"
        return error.event() + DONE


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
