"""A hash ring: keys to members, so that few keys move when a member comes or goes.

Karger et al., "Consistent Hashing and Random Trees" (1997). With a test for room it is Mirrokni et al., "Consistent
Hashing with Bounded Loads" (2018).
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

Member = TypeVar("Member")

_POINTS = 64  # of each member; shares of keys then differ by some 12%


class HashRing(Generic[Member]):
    """The members' points on a circle of 64-bit numbers. A key belongs to the member whose point follows it."""

    def __init__(self, members: Collection[Member]) -> None:
        points = [(hash_of(f"{i} {member}".encode()), member) for member in members for i in range(_POINTS)]
        points.sort(key=lambda point: point[0])
        self._hashes = [point for point, _ in points]
        self._members = [member for _, member in points]

    def find(self, key: int, has_room: Callable[[Member], bool]) -> Member | None:
        """The first member with room at or behind `key`, a 64-bit number; None if there is none."""
        begin = bisect.bisect_left(self._hashes, key)
        refused = set()
        for i in range(len(self._members)):
            member = self._members[(begin + i) % len(self._members)]
            if member not in refused:
                if has_room(member):
                    return member
                refused.add(member)
        return None


def hash_of(data: bytes, before: int = 0) -> int:
    """A 64-bit number for `data` that follows what `before` is the number of."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=before.to_bytes(8, "little")).digest(), "little")
