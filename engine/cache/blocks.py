"""Paged KV bookkeeping: which blocks are free, who shares one, and what a full block contains.

The pool knows block numbers only; the tensors live in the executor. A full block's digest says all that decides its
content (see `identity`), so equal digests mean equal KV content. Freed blocks keep their content and their digest until
they are needed for something else, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .identity import Digest


class BlockWatch:
    """Changes to a pool's cached blocks, for a tier that keeps their content. The tier empties it when it reads it.

    `idle` are contents whose block lost its last reference, a sequence's first block first. `evicted` are contents
    whose block was given to something else; the content is intact until the next step writes to the block.
    """

    def __init__(self) -> None:
        self.idle: OrderedDict[Digest, None] = OrderedDict()
        self.evicted: list[tuple[Digest, int]] = []

    def clear(self) -> None:
        """Forget all of them."""
        self.idle.clear()
        self.evicted.clear()


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. Every operation is O(1) a block.

    A block is used while its reference count is above zero. `pending` digests are being computed by a running
    sequence: others that need the same content should wait for it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._digests: list[Digest | None] = [None] * num_blocks
        self._cached: dict[Digest, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be reused first
        self._pending: dict[Digest, int] = {}
        self._watch: BlockWatch | None = None

    def watch(self) -> BlockWatch:
        """Have it noted from now on what becomes of cached blocks."""
        self._watch = self._watch or BlockWatch()
        return self._watch

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds, with or without cached content."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one sequence holds."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match(self, digests: Iterable[Digest]) -> list[int]:
        """The blocks that hold the longest cached prefix of `digests`. They are not acquired yet."""
        found: list[int] = []
        for digest in digests:
            block = self._cached.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free now, and would be taken by `acquire`."""
        return sum(1 for block in blocks if self._ref_counts[block] == 0)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of `blocks`, which `match` has just found or a sequence holds."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, forgetting what they held. Raises MemoryError, taking none, if there are fewer."""
        if count > len(self._free):
            raise MemoryError(f"{count} KV blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            digest = self._digests[block]
            if digest is not None:
                del self._cached[digest]
                self._digests[block] = None
                if self._watch is not None:
                    self._watch.idle.pop(digest, None)
                    self._watch.evicted.append((digest, block))
            self._ref_counts[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each of a sequence's `blocks`, given in the sequence's order.

        A block without references becomes free: behind all others if its content is cached, the later ones of the
        sequence to be reused earlier (a chain is only found from its start); before all others if it is not.
        """
        for block in reversed(blocks):
            count = self._ref_counts[block] - 1
            if count < 0:
                raise RuntimeError(f"KV block {block} was released more often than acquired")
            self._ref_counts[block] = count
            if count == 0:
                self._free[block] = None
                if self._digests[block] is None:
                    self._free.move_to_end(block, last=False)
        if self._watch is not None:
            for block in blocks:
                digest = self._digests[block]
                if digest is not None and self._ref_counts[block] == 0:
                    self._watch.idle[digest] = None

    def register(self, block: int, digest: Digest) -> None:
        """Say that `block` is full, computed, and holds the content named `digest`.

        If another block already holds that content, `block` stays its holder's own.
        """
        if digest not in self._cached and self._digests[block] is None:
            self._cached[digest] = block
            self._digests[block] = digest

    def discard(self, digest: Digest) -> None:
        """Forget the content named `digest`, if any block holds it. A free block is then the first to be reused."""
        block = self._cached.pop(digest, None)
        if block is None:
            return
        self._digests[block] = None
        if block in self._free:
            self._free.move_to_end(block, last=False)

    def announce(self, digests: Iterable[Digest]) -> None:
        """Say that a running sequence is about to compute blocks with these digests."""
        for digest in digests:
            self._pending[digest] = self._pending.get(digest, 0) + 1

    def retract(self, digests: Iterable[Digest]) -> None:
        """Take back an announcement: the blocks are computed, or never will be by that sequence."""
        for digest in digests:
            count = self._pending[digest] - 1
            if count:
                self._pending[digest] = count
            else:
                del self._pending[digest]

    def is_pending(self, digest: Digest) -> bool:
        """Whether a running sequence has announced this content and not yet computed it."""
        return digest in self._pending

    def forget(self) -> None:
        """Drop the content of every block from the cache; blocks that sequences hold stay theirs."""
        self._cached.clear()
        self._digests = [None] * self.num_blocks
        if self._watch is not None:
            self._watch.clear()
