"""API keys: the check that a request has one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence, Set
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ApiError, error_response
from ..local_path import local_path

HEALTH_PATHS = frozenset({"/health", "/ping", "/version"})
METRICS_PATHS = frozenset({"/load", "/metrics"})


class ApiKeyAuth:
    """Requires a key, as `Authorization: Bearer KEY` or `x-api-key: KEY`, on all paths except `open_paths`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Set[str]) -> None:
        self.app = app
        self._open_paths = open_paths
        # Digests have one length, so that the time of a comparison does not show the length of a key.
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and local_path(scope) not in self._open_paths and not self._authorized(scope):
            error = ApiError(
                HTTPStatus.UNAUTHORIZED,
                "a valid API key is needed: send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'",
                code="invalid_api_key",
            )
            await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _authorized(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = [headers.get("x-api-key", ""), bearer if scheme.lower() == "bearer" else ""]
        digests = [_digest(key.strip().encode("latin-1")) for key in offered]  # as ASGI decoded the header's bytes
        # Every key is compared, so that the time taken does not tell which one was close.
        matches = [hmac.compare_digest(mine, known) for mine in digests for known in self._digests]
        return any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
