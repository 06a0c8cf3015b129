"""WantedSnapshots: where those who wait want the state of the one who computes what they have in common."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from .identity import Digest


class WantedSnapshots:
    """Digests of blocks that are being computed, at whose ends snapshots are to be taken."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._digests: set[Digest] = set()

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._digests

    def want(self, digest: Digest) -> None:
        """Have a snapshot taken after a block."""
        self._digests.add(digest)

    def drop(self, digests: Iterable[Digest]) -> None:
        """Forget blocks that are computed, or never will be."""
        self._digests.difference_update(digests)

    def chunk(self, start: int, num_tokens: int, digests: Callable[[int], Seq[Digest]]) -> int:
        """How many of the next `num_tokens` from `start` on a step computes: it ends at the first snapshot on the way.

        `digests(n)` gives the digests of the sequence's first `n` blocks.
        """
        if not self._digests or not num_tokens:
            return num_tokens
        first, last = start // self._block_size, (start + num_tokens - 1) // self._block_size
        known = digests(last)
        stops = (i for i in range(first, last) if known[i] in self._digests)
        return next(((i + 1) * self._block_size - start for i in stops), num_tokens)


def num_common(a: Seq[Digest], b: Seq[Digest]) -> int:
    """How many blocks two sequences begin with alike. A digest says all of the blocks before its own, too."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[i] != b[i])
