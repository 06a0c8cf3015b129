"""The path of a request as routes know it."""

from __future__ import annotations

from starlette.types import Scope


def local_path(scope: Scope) -> str:
    """A request's path without the one that a proxy serves this server under."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
