"""Plain ASGI middleware: request ids with the access log, what a body may be, and middleware of users' own."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import uuid
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidewheel.engine.errors import TidewheelError, shortened

from ..errors import ApiError, as_api_error, error_response

access_logger = logging.getLogger("tidewheel.access")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,100}")
_JSON = re.compile(r"[ \t]*application/(?:[a-z0-9!#$&^_.+-]+\+)?json[ \t]*(?:;.*)?", re.IGNORECASE)
_METHODS_WITHOUT_JSON = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})  # a page needs leave for DELETE in any case
_SHOWN = 100  # characters of what a client has sent


class RequestId:
    """Gives each request an id, the client's `x-request-id` where it sent a sane one, and answers what fails inside.

    Handlers find the id as `request.state.request_id`; clients, with `send_header`, as a header (and as `request-id`,
    where Anthropic's look for it). With `access_log`, each response is logged when it starts, without what the client
    put into the URL's query.
    """

    def __init__(self, app: ASGIApp, *, root_path: str, send_header: bool, access_log: bool) -> None:
        self.app = app
        self._root_path = root_path
        self._send_header = send_header
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        names = (b"x-request-id", b"request-id") if self._send_header else ()
        headers = [(name, request_id.encode("ascii")) for name in names]
        started = False

        # Not a coroutine of its own, so that a streamed token costs no extra one.
        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
                if self._access_log:
                    _log_access(scope, message["status"], request_id)
            return send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as failure:
            if started:
                raise  # nothing more can be said; the server closes the connection
            await error_response(as_api_error(failure))(scope, receive, send_with_id)


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


class JsonOnly:
    """Answers 415 to what changes or computes something and is not sent as JSON.

    A browser lets any web page send a form or plain text to any server, and asks the server first only before it sends
    JSON. So no page can use a server without keys unless --allowed-origins lets it. Programs may leave the content
    type out where there is no body; a browser, which always says where a page is from, may not.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _METHODS_WITHOUT_JSON:
            headers = Headers(scope=scope)
            has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
            from_page = any(name in headers for name in ("origin", "sec-fetch-site"))
            if (has_body or from_page) and not _JSON.fullmatch(headers.get("content-type", "")):
                await error_response(_not_json(headers.get("content-type")))(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _not_json(content_type: str | None) -> ApiError:
    given = "without a content type" if content_type is None else f"as {content_type[:_SHOWN]}"
    return ApiError(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        f"the request was sent {given}; send it as JSON, with the header 'content-type: application/json' "
        "(curl: -H 'content-type: application/json')",
        code="unsupported_media_type",
    )


def import_middleware(path: str) -> Middleware:
    """The middleware at an import path such as `package.module.Name`.

    That is a class, made with the app as its only argument, or an `async def` function of a request and of what
    calls the rest of the app. Raises TidewheelError for what cannot be imported or is neither.
    """
    module_name, _, name = path.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise TidewheelError(f"--middleware {path} cannot be imported: {error}") from error
    if inspect.iscoroutinefunction(found):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    if not inspect.isclass(found):
        raise TidewheelError(f"--middleware {path} is neither a class nor an async function")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise TidewheelError(f"--middleware {path} must be made with the app as its only argument: {error}") from error
    factory: Any = found
    return Middleware(factory)


def _log_access(scope: Scope, status: int, request_id: str) -> None:
    host, port = scope.get("client") or ("-", 0)
    method, path = scope["method"], quote(shortened(scope["path"]))
    fields = {"client": host, "method": method, "path": path, "status": status, "request_id": request_id}
    access_logger.info(
        '%s:%d "%s %s" %d x-request-id=%s', host, port, method, path, status, request_id, extra={"fields": fields}
    )
