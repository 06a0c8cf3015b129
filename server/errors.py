"""Errors of all kinds in the shapes that clients expect: OpenAI's `{"error": {"message", "type", "param", "code"}}`,
Anthropic's under `/v1/messages`, and Ollama's under `/api`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ExceptionHandler, Receive, Scope, Send

from tidewheel.engine.errors import BusyError, EngineDeadError, InvalidRequestError, shortened

from .local_path import local_path

logger = logging.getLogger(__name__)

REFUSAL = "refusal"
"""Where a request's state has the words of the error that it is answered with, for the log."""

_RETRY_AFTER_S = 5
_LONGEST_MESSAGE = 1000  # characters, including what it quotes


class ApiError(Exception):
    """An answer that is an error: an HTTP status, the four fields of OpenAI's error object, and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.headers = headers or {}
        self.status = status
        self.message = shortened(message, _LONGEST_MESSAGE)
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """The JSON error object."""
        error = {"message": self.message, "type": error_type(self.status), "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def event(self) -> bytes:
        """The error as a server-sent event."""
        return b"data: " + self.body() + b"\n\n"

    def anthropic_event(self, request_id: str | None = None) -> bytes:
        """The error as a server-sent event in Anthropic's shape."""
        return b"event: error\ndata: " + self.anthropic_body(request_id) + b"\n\n"

    def anthropic_body(self, request_id: str | None = None) -> bytes:
        """The JSON error object in Anthropic's shape."""
        error = {"type": _anthropic_type(self.status), "message": self.message}
        return orjson.dumps({"type": "error", "error": error, "request_id": request_id})

    def ollama_body(self) -> bytes:
        """The JSON error object in Ollama's shape."""
        return orjson.dumps({"error": self.message})


class ErrorResponse(Response):
    """An ApiError as a response, in the shape of the protocol that the request's path belongs to."""

    def __init__(self, error: ApiError, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error.body(), error.status, headers, "application/json")
        self._error = error
        self._own_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[REFUSAL] = self._error.message
        path = local_path(scope)
        if (path + "/").startswith(("/v1/messages/", "/messages/")):
            self.body = self._error.anthropic_body(scope.get("state", {}).get("request_id"))
            self.init_headers(self._own_headers)
        elif path.startswith("/api/"):
            self.body = self._error.ollama_body()
            self.init_headers(self._own_headers)
        await super().__call__(scope, receive, send)


class ClientGone(Exception):  # noqa: N818 - it is no error
    """The client has hung up, so no answer is sent."""


def error_type(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    if status == HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    if status == HTTPStatus.FORBIDDEN:
        return "permission_error"
    if status == HTTPStatus.NOT_FOUND:
        return "not_found_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return "service_unavailable_error"
    return "invalid_request_error" if status < 500 else "server_error"


_ANTHROPIC_TYPES: Mapping[int, str] = {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def _anthropic_type(status: int) -> str:
    return _ANTHROPIC_TYPES.get(status) or (error_type(status) if status < 500 else "api_error")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 about `param`."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def as_api_error(failure: BaseException) -> ApiError:
    """The error answer for any failure. Unexpected exceptions are logged, and the answer has no details of them."""
    if isinstance(failure, ApiError):
        return failure
    if isinstance(failure, InvalidRequestError):
        return bad_request(str(failure), failure.param)
    if isinstance(failure, BusyError):
        headers = {"retry-after": str(_RETRY_AFTER_S)}
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(failure), code="busy", headers=headers)
    if isinstance(failure, EngineDeadError):
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(failure), code="engine_unavailable")
    if isinstance(failure, RecursionError):
        return bad_request("the body is nested too deeply", code="invalid_json")
    logger.error("a request failed", exc_info=failure)
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal server error", code="internal_error")


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """An ApiError as a response."""
    return ErrorResponse(error, {**error.headers, **(headers or {})})


_ON_REQUEST = {
    "/tokenizer_info": "--enable-tokenizer-info-endpoint",
    "/v1/files": "--batch-dir FOLDER",
    "/v1/batches": "--batch-dir FOLDER",
}
"""Paths that a server has only with an option."""


_ELSEWHERE = {
    "/audio/": "this server reads and writes no sound; send the transcript of a speech server",
    "/images/": "this server writes text only; chat completions may have images for models that see them",
    "/moderations": "use /v1/classify with a classifier, or ask a chat model",
    "/assistants": "use /v1/responses",
    "/responses/compact": 'conversations are not compacted: ask for "truncation": "auto", or leave items out',
    "/threads": "use /v1/responses",
    "/fine_tuning": "this server trains no models; it serves adapters with --enable-lora",
}
"""Where other servers have something, and what to do here."""


async def _on_http_exception(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, HTTPException)
    status, message = failure.status_code, str(failure.detail)
    local = request.url.path.removeprefix(request.scope.get("root_path", "")).removeprefix("/v1")
    instead = next((instead for path, instead in _ELSEWHERE.items() if local.startswith(path)), None)
    if status == HTTPStatus.METHOD_NOT_ALLOWED and instead is not None:  # it only looks like another path that is there
        status = HTTPStatus.NOT_FOUND
    if status == HTTPStatus.NOT_FOUND:
        message = f"there is no endpoint {shortened(request.url.path)}"
        if flag := next((flag for path, flag in _ON_REQUEST.items() if request.url.path.endswith(path)), None):
            message += f"; start the server with {flag} to have it"
        if instead is not None:
            message += f"; {instead}"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (failure.headers or {}).get("Allow", "another method")
        message = f"{shortened(request.url.path)} does not take {request.method}; it takes {allowed}"
    return error_response(ApiError(status, message), failure.headers)


async def _on_failure(request: Request, failure: Exception) -> Response:
    return error_response(as_api_error(failure))


async def _on_client_gone(request: Request, failure: Exception) -> Response:
    failure.__traceback__ = None  # whose frames know it: only a collection of garbage could free them
    return Response(status_code=499)  # for logs only; no client reads it


def exception_handlers() -> dict[int | type[Exception], ExceptionHandler]:
    """Starlette's table of handlers, so that no answer leaves in another shape."""
    return {
        HTTPException: _on_http_exception,
        ClientGone: _on_client_gone,
        ClientDisconnect: _on_client_gone,  # while its body was read
        ApiError: _on_failure,
        InvalidRequestError: _on_failure,
        BusyError: _on_failure,
        EngineDeadError: _on_failure,
        RecursionError: _on_failure,
        Exception: _on_failure,
    }
