"""API keys: the check that a request has one."""

from __future__ import annotations

from collections.abc import Set
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ApiError, error_response
from ..local_path import local_path
from .api_keys import STRANGER, ApiKeys, Tenant, act_as

HEALTH_PATHS = frozenset({"/health", "/ping", "/version"})
METRICS_PATHS = frozenset({"/load", "/metrics"})


class ApiKeyAuth:
    """Requires a key, as `x-api-key: KEY` or `Authorization: Bearer KEY`, on all paths except `open_paths`.

    The root is the page's for those who read it, and an endpoint for a POST, which needs a key. Sets `current_tenant`
    on every path: to the tenant of the first of these keys that is valid, or to STRANGER.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Set[str]) -> None:
        self.app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            tenant = self._tenant(scope)
            path = local_path(scope)
            if tenant is None and (path not in self._open_paths or (path == "/" and scope["method"] == "POST")):
                error = ApiError(
                    HTTPStatus.UNAUTHORIZED,
                    "a valid API key is needed: send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'",
                    code="invalid_api_key",
                )
                await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
            act_as(tenant or STRANGER)  # always, as a connection's next request may begin in the last one's context
        await self.app(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant | None:
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
        return self._keys.tenant([key.strip().encode("latin-1") for key in offered if key])  # as ASGI decoded them
