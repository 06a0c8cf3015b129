"""Plain ASGI middleware: request ids, bearer keys, and a limit on a body's size."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Awaitable, Sequence, Set
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidewheel.server.errors import ApiError, error_response

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """Gives each request an id, the client's `x-request-id` where it sent a sane one, and returns it as a header.

    Handlers find it as `request.state.request_id`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        header = (b"x-request-id", request_id.encode("ascii"))

        # Not a coroutine of its own, so that a streamed token costs no extra one.
        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            return send(message)

        await self.app(scope, receive, send_with_id)


class BearerAuth:
    """Asks for `Authorization: Bearer <one of the keys>` everywhere but on the open paths, the probes' unless told."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Set[str] = OPEN_PATHS) -> None:
        self.app = app
        self._open_paths = open_paths
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths and not self._authorized(scope):
            error = ApiError(
                HTTPStatus.UNAUTHORIZED,
                "a valid API key is needed: send it as 'Authorization: Bearer <key>'",
                code="invalid_api_key",
            )
            await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _authorized(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        offered = key.strip().encode("latin-1")  # as ASGI decoded the header's bytes
        # Every key is compared, so that the time taken does not tell which one was close.
        matches = [hmac.compare_digest(offered, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """Answers 413 to a body over `max_bytes`: at once when its length is declared, otherwise while it is read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await error_response(self._error())(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    raise self._error()
            return message

        await self.app(scope, receive_counted, send)

    def _error(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is over this server's limit of {self._max_bytes} bytes (--max-body-size)",
            code="body_too_large",
        )
