"""From `--shared-store` to a store. What only stores need is imported when there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import SharedStore

_SCHEMES = ("redis", "rediss", "unix")


def check_store(target: str) -> str | None:
    """What a store's name must be; None if `target` is valid."""
    scheme, found, _ = target.partition("://")
    if found and "sentinel" in scheme:
        from .base import INSTEAD_OF_SENTINEL

        return f"must not be the URL of a Sentinel, {INSTEAD_OF_SENTINEL}"
    if found and scheme not in _SCHEMES:
        return f"must be a folder, or a URL that begins with {', '.join(f'{one}://' for one in _SCHEMES)}"
    return None if target else "must be a folder or a URL"


def open_store(target: str, password: str | None) -> SharedStore:
    """The store in a folder, or at the URL of a Redis database or cluster. Raises TidewheelError."""
    if "://" in target:
        from .redis_store import RedisStore

        return RedisStore(target, password)
    from .folder import FolderStore

    return FolderStore(target)
