"""SequenceBlocks: how sequences come by their KV blocks: from the prefix cache, fresh, shared by a fork, or copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from ..cache.blocks import BlockPool
from .sequence import Sequence, SequenceState


class SequenceBlocks:
    """Keeps block tables and the pool's reference counts in step.

    Forks hold the blocks of the sequence that they came from. A full block is never written again; one that is not is
    copied by all but one of its holders, before they write to it.
    """

    def __init__(self, pool: BlockPool, *, prefix_caching: bool) -> None:
        self._pool = pool
        self._prefix_caching = prefix_caching
        self._forked: dict[int, Sequence] = {}  # by key; since the last decode, so their last blocks may be shared

    @property
    def has_forked(self) -> bool:
        """Whether sequences have forked since blocks were last provided."""
        return bool(self._forked)

    def cached(self, sequence: Sequence) -> list[int]:
        """The blocks that a sequence may start with, in the prefix cache. They are not acquired yet."""
        return self._pool.match(sequence.digests(self._num_reusable(sequence), self._pool.block_size))

    def should_await_prefix(self, sequence: Sequence) -> bool:
        """Whether a running sequence is computing the very block that this one would have to start with."""
        if sequence.awaited is None or not self._pool.is_pending(sequence.awaited):
            digests = sequence.digests(self._num_reusable(sequence), self._pool.block_size)
            num_cached = len(self._pool.match(digests))
            missing = digests[num_cached] if num_cached < len(digests) else None
            sequence.awaited = missing if missing is not None and self._pool.is_pending(missing) else None
        return sequence.awaited is not None

    def num_wanted(self, sequence: Sequence, cached: list[int]) -> int:
        """How many of the free blocks the tokens of a sequence take that finds `cached`."""
        pool = self._pool
        return pool.blocks_for(sequence.num_tokens) - len(cached) + pool.num_unreferenced(cached)

    def hold(self, sequence: Sequence, cached: list[int]) -> None:
        """Give a sequence blocks for all of its tokens, `cached` first, and announce what it is about to compute."""
        pool = self._pool
        pool.acquire(cached)
        sequence.add_blocks(cached)
        sequence.add_blocks(pool.allocate(pool.blocks_for(sequence.num_tokens) - len(cached)))
        sequence.num_registered = len(cached)
        sequence.num_computed = len(cached) * pool.block_size
        if self._prefix_caching:
            full = sequence.digests(sequence.num_tokens // pool.block_size, pool.block_size)
            sequence.announced = full[: len(cached) - 1 : -1] if cached else full[::-1]
            pool.announce(sequence.announced)

    def register_full(self, sequence: Sequence) -> None:
        """Let the prefix cache know the blocks that a sequence has filled."""
        if not self._prefix_caching:
            return
        block_size = self._pool.block_size
        full = sequence.num_computed // block_size
        for i in range(sequence.num_registered, full):
            digest = sequence.digests(i + 1, block_size)[i]
            self._pool.register(int(sequence.block_table[i]), digest)
            if sequence.announced:
                self._pool.retract([sequence.announced.pop()])
        sequence.num_registered = full

    def share(self, sequence: Sequence, fork: Sequence) -> None:
        """Let `fork` be where `sequence` is, on the same blocks instead of its own."""
        wanted, held = sequence.blocks(), fork.blocks()
        common = 0
        while common < len(held) and held[common] == wanted[common]:
            common += 1
        self._pool.acquire(wanted[common:])
        self._pool.release(held[common:])
        fork.become(sequence)
        self._forked |= {sequence.key: sequence, fork.key: fork}

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's blocks back, and what it has announced."""
        self._pool.retract(sequence.announced)
        sequence.announced = []
        self._pool.release(sequence.blocks())
        sequence.drop_blocks()

    def lacking(self, decoding: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Those of `decoding` that need a block more for their last token, and those that need a copy of their last."""
        block_size = self._pool.block_size
        short = [s for s in decoding if s.num_tokens > s.num_blocks * block_size]
        holders: dict[int, list[Sequence]] = defaultdict(list)
        for sequence in self._forked.values():
            if sequence.state is SequenceState.DECODING and sequence.num_computed % block_size:
                holders[int(sequence.block_table[sequence.num_computed // block_size])].append(sequence)
        return short, [sequence for sharing in holders.values() for sequence in sharing[1:]]

    def extend(self, sequence: Sequence, num_tokens: int, num_spare: int) -> int:
        """Give a sequence blocks for `num_tokens`, or as many as are free but for `num_spare`.

        Returns how many tokens it has blocks for.
        """
        wanted = self._pool.blocks_for(num_tokens) - sequence.num_blocks
        count = min(wanted, self._pool.num_free - num_spare)
        if count > 0:
            sequence.add_blocks(self._pool.allocate(count))
        return sequence.num_blocks * self._pool.block_size

    def provide(self, short: Seq[Sequence], sharing: Seq[Sequence]) -> tuple[list[tuple[int, int]], set[int]]:
        """Give those that are `lacking` a block each, all of which must be free.

        Returns the copies to make, `(from, to)`, and the keys of sequences whose block tables may have changed since
        the last time.
        """
        copies = []
        for sequence in short:
            sequence.add_blocks(self._pool.allocate(1))
        for sequence in sharing:
            last = sequence.num_computed // self._pool.block_size
            shared, own = int(sequence.block_table[last]), self._pool.allocate(1)[0]
            copies.append((shared, own))
            sequence.block_table[last] = own
            self._pool.release([shared])
        moved = {sequence.key for sequence in short} | self._forked.keys()
        self._forked = {}
        return copies, moved

    def _num_reusable(self, sequence: Sequence) -> int:
        return sequence.num_reusable // self._pool.block_size if self._prefix_caching else 0
