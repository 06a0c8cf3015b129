"""Removes extra slashes from paths: `/v1//models` and `/v1/models/` mean `/v1/models`."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("/{2,}")


class PathNormalization:
    """Serves paths under `/v1` that have extra slashes, as clients make them from base URLs that end with a slash.

    A redirect would make the client send its body twice, and would need the URL of the proxy in front. Paths outside
    of `/v1` are not changed: proxies hide some of them, and know only one spelling.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if "//" in path or path.endswith("/"):
                root: str = scope.get("root_path", "")
                prefix = root if root and path.startswith(root + "/") else ""
                normalized = _SLASHES.sub("/", path[len(prefix) :])
                if normalized.startswith("/v1/"):
                    scope["path"] = prefix + normalized.rstrip("/")
        await self.app(scope, receive, send)
