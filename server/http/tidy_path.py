"""Paths of the API as clients put them together: `/v1//models` and `/v1/models/` are `/v1/models`."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("/{2,}")


class TidyPath:
    """Serves paths under `/v1` with slashes too many, which come of base URLs that end with one.

    A redirect would cost the client its body once more, and need to know the URL that a proxy is known by. Paths
    outside of `/v1` stay as they are: proxies hide some of them, and know them by one spelling.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if "//" in path or path.endswith("/"):
                root: str = scope.get("root_path", "")
                prefix = root if root and path.startswith(root + "/") else ""
                tidy = _SLASHES.sub("/", path[len(prefix) :])
                if tidy.startswith("/v1/"):
                    scope["path"] = prefix + tidy.rstrip("/")
        await self.app(scope, receive, send)
