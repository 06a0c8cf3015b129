"""SharedStore: values that all replicas read and write."""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from typing import Literal, Protocol, TypeAlias

import msgspec

from ..errors import ApiError

MAX_VALUE_BYTES = 32 * 2**20
INSTEAD_OF_SENTINEL = (
    "which is not supported: name an address that leads to the Redis server in charge, or take a Redis cluster"
)
PREFIX = "tidewheel"
"""Begins the names of all that is in a store, which may have other things in it."""

When: TypeAlias = Literal["always", "new", "there"]
"""When to put a value: "new" only if there is none, "there" only if there is one."""


class StoreError(ApiError):
    """The store cannot be used now: a 503 for the request that needs it."""

    def __init__(self, message: str) -> None:
        super().__init__(HTTPStatus.SERVICE_UNAVAILABLE, message, code="store_unavailable")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one kind. They expire `expires_s` after they were put, or read if `renews`; None is never.

    The `most` that were put or read last are kept. What lasts for less than an hour need not survive a power cut.
    """

    name: str
    expires_s: float | None = None
    renews: bool = False
    most: int | None = None

    @property
    def lasts(self) -> bool:
        """Whether its values are there for later."""
        return self.expires_s is None or self.expires_s >= 3600


class SharedStore(Protocol):
    """Values of at most MAX_VALUE_BYTES, by kind and key. Keys may be anything that clients send.

    Nothing here blocks the event loop. All raise StoreError if the store does not answer.
    """

    shown: str
    """Where it is, without a password."""

    async def get(self, kind: Kind, key: str) -> bytes | None:
        """The value, if there is one that has not expired."""

    async def put(self, kind: Kind, key: str, value: bytes, when: When = "always") -> bool:
        """Keep a value; whether it was `when` says. A reader finds the old value or the new one, never a part."""

    async def delete(self, kind: Kind, key: str) -> bool:
        """Forget a value; whether there was one."""

    async def values(self, kind: Kind) -> list[bytes]:
        """All values of a kind, in no order."""

    async def close(self) -> None:
        """Let go of it."""


def name_of(key: str) -> str:
    """The name of a key in files and databases: clients choose keys, but not these names."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def check_size(value: bytes) -> None:
    """Raises ApiError (413) for a value that no store takes."""
    if len(value) > MAX_VALUE_BYTES:
        raise ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"what is to be stored has {len(value)} bytes, and a store takes at most {MAX_VALUE_BYTES}: send "
            '"store": false',
            code="too_large_to_store",
        )
