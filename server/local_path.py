"""The path of a request as routes know it."""

from __future__ import annotations

from starlette.types import Scope


def local_path(scope: Scope) -> str:
    """The path without `--root-path`, which some proxies leave in front and others remove."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path
