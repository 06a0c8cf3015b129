"""Plain ASGI middleware: request ids and the access log, limits on bodies, and loading of the user's middleware."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Awaitable, Set
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidewheel.engine.errors import TidewheelError, shortened

from ..errors import REFUSAL, ApiError, as_api_error, error_response
from ..ids import new_id
from ..local_path import local_path
from .forms import is_upload

_MAX_REASON = 300  # characters
access_logger = logging.getLogger("tidewheel.access")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,100}")
_JSON = re.compile(r"[ \t]*application/(?:[a-z0-9!#$&^_.+-]+\+)?json[ \t]*(?:;.*)?", re.IGNORECASE)
_FORM = re.compile(r"[ \t]*application/x-www-form-urlencoded[ \t]*(?:;.*)?", re.IGNORECASE)
_FORMS_ELSEWHERE = ("/audio/", "/images/")  # other servers take forms there; here there is nothing, which a 404 says
_METHODS_WITHOUT_JSON = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})  # browsers ask before any DELETE
_MAX_ARRIVING = 256 * 2**20  # bytes of all bodies together that may wait for their senders
_SMALL = 2**18  # bytes
_RETRY_AFTER_S = 5
_SHOWN = 100  # most characters to repeat of what a client has sent


def is_request_id(text: str) -> bool:
    """Whether a client's `x-request-id` is taken: it comes back in headers and in the log."""
    return _REQUEST_ID.fullmatch(text) is not None


class RequestId:
    """Gives each request an id, and answers requests whose handlers fail.

    The id is the client's `x-request-id` if that is valid. Handlers find it as `request.state.request_id`. With
    `send_header`, clients get it as a header, and as `request-id` for Anthropic's clients. With `access_log`, each
    response is logged when it starts, without the URL's query. Responses of `unlogged_paths` are not logged, and
    responses of `unlogged_successes` only if they are errors.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        root_path: str,
        send_header: bool,
        access_log: bool,
        unlogged_paths: Set[str] = frozenset(),
        unlogged_successes: Set[str] = frozenset(),
    ) -> None:
        self.app = app
        self._root_path = root_path
        self._send_header = send_header
        self._access_log = access_log
        self._unlogged_paths = unlogged_paths
        self._unlogged_successes = unlogged_successes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not is_request_id(request_id):
            request_id = new_id()
        scope.setdefault("state", {})["request_id"] = request_id
        names = (b"x-request-id", b"request-id") if self._send_header else ()
        headers = [(name, request_id.encode("ascii")) for name in names]
        started = False

        # A plain function: a coroutine would cost every streamed token an extra one.
        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
                if self._access_log and self._is_logged(scope, message["status"]):
                    _log_access(scope, message["status"], request_id)
            return send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as failure:
            if started:
                raise  # no error can be sent any more; the server closes the connection
            await error_response(as_api_error(failure))(scope, receive, send_with_id)

    def _is_logged(self, scope: Scope, status: int) -> bool:
        path = scope["path"].removeprefix(self._root_path)
        return path not in self._unlogged_paths and (status >= 400 or path not in self._unlogged_successes)


class BodyLimit:
    """Answers 413 to a body over `max_bytes`: at once if its length is declared, otherwise as soon as it is longer.

    All bodies that are still arriving may have `max_arriving_bytes` together. Beyond that, large ones get a 503.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_arriving_bytes: int = _MAX_ARRIVING) -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._max_arriving_bytes = max(max_arriving_bytes, 2 * max_bytes)
        self._arriving_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await error_response(self._error())(scope, receive, send)
            return
        received = counted = 0

        async def receive_counted() -> Message:
            nonlocal received, counted
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    raise self._error()
                # A small body is never refused for the large ones of others.
                now_arriving = received if message.get("more_body") and received > _SMALL else 0
                self._arriving_bytes += now_arriving - counted
                counted = now_arriving
                if counted and self._arriving_bytes > self._max_arriving_bytes:
                    raise _too_many_bodies()
            return message

        try:
            await self.app(scope, receive_counted, send)
        finally:
            self._arriving_bytes -= counted

    def _error(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is over this server's limit of {self._max_bytes} bytes (--max-body-size)",
            code="body_too_large",
        )


def _too_many_bodies() -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "too many large bodies are arriving at the same time: try again in a few seconds",
        code="too_many_bodies",
        headers={"retry-after": str(_RETRY_AFTER_S)},
    )


class JsonOnly:
    """Answers 415 to requests that change or compute something and are not marked as JSON.

    A browser lets any web page send a form or plain text to any server. Only before it sends JSON does it ask the
    server. So no page can use a server without keys, unless --allowed-origins allows it. Browsers are known by their
    `origin` or `sec-fetch-site` header. Other programs may leave the content type out without a body, and for Ollama's
    API with one too, as some of its clients do. They may upload files as forms, and call JSON a form as `curl -d` does.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _METHODS_WITHOUT_JSON:
            headers = Headers(scope=scope)
            has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
            from_page = any(name in headers for name in ("origin", "sec-fetch-site"))
            path = local_path(scope)
            is_untyped = "content-type" not in headers and path.startswith("/api/")
            is_form = _FORM.fullmatch(headers.get("content-type", "")) is not None
            if is_untyped or is_form or is_upload(scope) or path.removeprefix("/v1").startswith(_FORMS_ELSEWHERE):
                has_body = False  # that has to be marked as JSON
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

    It is a class, made with the app as its only argument, or an `async def` function of a request and of `call_next`,
    which calls the rest of the app. Raises TidewheelError if it cannot be imported or is neither.
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
    reason = ""
    if status >= 400 and (refusal := scope["state"].get(REFUSAL)):
        # On one line, whatever it quotes from a request.
        fields["reason"] = "".join(c if c.isprintable() else " " for c in shortened(refusal, _MAX_REASON))
        reason = f": {fields['reason']}"
    access_logger.info(
        '%s:%d "%s %s" %d x-request-id=%s%s',
        host,
        port,
        method,
        path,
        status,
        request_id,
        reason,
        extra={"fields": fields},
    )
