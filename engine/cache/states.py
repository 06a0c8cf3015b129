"""StateSlots: where sequences keep the state of recurrent layers, and snapshots from which other sequences go on."""

from __future__ import annotations

from .blocks import BlockPool
from .identity import Digest


class StateSlots:
    """`num_states` slots, one for each running sequence. The others hold snapshots, the least recently used go first.

    A snapshot is a copy of a sequence's state where a block ends; the digest of that block names it. Copies are
    queued: the device makes them one after the other before the next step.
    """

    def __init__(self, num_states: int, block_size: int) -> None:
        self._pool = BlockPool(num_states, block_size)
        self._copies: list[tuple[int, int]] = []

    def has(self, digest: Digest) -> bool:
        """Whether there is a snapshot."""
        return bool(self._pool.match([digest]))

    def start(self, digest: Digest | None) -> int:
        """A slot for a sequence: with the state of a snapshot that there is, or to begin with."""
        snapshot = [] if digest is None else self._pool.match([digest])
        if snapshot and self._pool.num_free > 1:  # else the snapshot's own slot is the one that is left
            self._pool.acquire(snapshot)
            slot = self._pool.allocate(1)[0]
            self._pool.release(snapshot)
            self._copies.append((snapshot[0], slot))
            return slot
        return self._pool.allocate(1)[0]

    def fork(self, source: int, slot: int) -> int:
        """Copy the state in the slot `source` to `slot`, or to a new one if that is -1; returns the slot."""
        target = self._pool.allocate(1)[0] if slot < 0 else slot
        self._copies.append((source, target))
        return target

    def keep(self, slot: int, digest: Digest, instead_of: Digest | None = None) -> None:
        """Take a snapshot, if there is none of this state and a slot is free. It may take the place of another."""
        if instead_of is not None:
            self._pool.discard(instead_of)
        if not self._pool.num_free or self.has(digest):
            return
        snapshot = self._pool.allocate(1)
        self._copies.append((slot, snapshot[0]))
        self._pool.register(snapshot[0], digest)
        self._pool.release(snapshot)

    def end(self, slot: int) -> None:
        """Take a sequence's slot back."""
        self._pool.release([slot])

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies to make before the next step, `(from, to)`, in order."""
        copies, self._copies = self._copies, []
        return copies

    def forget(self) -> None:
        """Drop all snapshots."""
        self._pool.forget()
