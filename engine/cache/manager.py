"""CacheManager: how sequences come by their KV blocks: from the prefix cache, fresh, shared by a fork, or copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..devices.limits import ExecutorLimits
from .blocks import BlockPool
from .identity import Digest
from .snapshots import SPACING_BLOCKS, SnapshotPlan
from .states import StateSlots
from .wanted import WantedSnapshots, num_common
from .window import Window


class CachedSequence(Protocol):
    """What the manager knows and keeps of a sequence.

    The first `num_blocks` entries of each group's row of `block_tables [groups, most blocks]` are in use. A group holds
    those from its `first_blocks` on; a group with a window only up to `num_window_blocks`. Other entries name the
    group's padding block.
    """

    key: int
    num_tokens: int
    num_computed: int
    max_length: int
    block_tables: NDArray[np.int32]
    num_blocks: int
    num_window_blocks: int
    first_blocks: list[int]
    state_slot: int
    snapshots: SnapshotPlan
    num_registered: int
    announced: list[Digest]
    awaited: Digest | None

    @property
    def num_reusable(self) -> int:
        """How many tokens need not be computed if the cache has them."""
        ...

    def digests(self, count: int, block_size: int) -> list[Digest]:
        """The digests of the first `count` blocks."""
        ...


S = TypeVar("S", bound=CachedSequence)
Copies = dict[int, list[tuple[int, int]]]  # by group, (from, to)


class Prefix(Struct, frozen=True):
    """What the cache has of a sequence: its first `num_blocks` blocks are computed.

    `blocks` are those that it needs of them, by group: all of a group without a window; else the last ones, which the
    next token sees. Of `num_common` blocks the first group has K and V, but the state after them may be unknown.
    """

    num_blocks: int
    blocks: list[list[int]]
    num_common: int


class CacheManager:
    """Keeps block tables and the reference counts of all groups in step.

    Layers that see all tokens are one cache group; those that see a window of the same size are another. All groups
    divide a sequence into blocks alike, and each has blocks of its own. A group without a window holds a sequence's
    blocks from its admission to its end. One with a window gets them chunk by chunk, and frees them when all tokens to
    come are too far away. Recurrent layers have a slot of state for each sequence, and snapshots of it at block ends.

    Forks hold the blocks of the sequence that they came from. A full block is never written again; one that is not is
    copied by all but one of its holders, before they write to it.
    """

    def __init__(self, limits: ExecutorLimits, *, prefix_caching: bool) -> None:
        self.block_size = limits.block_size
        self._prefix_caching = prefix_caching
        self._pools = [BlockPool(group.num_blocks, limits.block_size) for group in limits.groups]
        self._padding = np.array([[group.padding_block] for group in limits.groups], np.int32)
        self._first = self._pools[0]
        self._windows = [
            Window(index, group.window, limits.block_size)
            for index, group in enumerate(limits.groups)
            if group.window is not None
        ]
        self._states = StateSlots(limits.num_states, limits.block_size) if limits.num_states else None
        self._cuts_prompts = limits.num_states > 0 and prefix_caching and limits.chunked_prefill
        self._is_full = limits.window is None  # the first group
        self._max_chunk_tokens = limits.max_num_batched_tokens
        self._forked: dict[int, CachedSequence] = {}  # by key; since the last decode: their last blocks may be shared
        self._freed: set[int] = set()  # keys of those whose blocks have been freed behind a window since then
        self._wanted = WantedSnapshots(limits.block_size)

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group."""
        return self._first.num_blocks

    @property
    def num_used(self) -> int:
        """Blocks of the first group that sequences hold."""
        return self._first.num_used

    @property
    def num_free(self) -> int:
        """Blocks that every group can give."""
        if len(self._pools) == 1:
            return self._first.num_free
        return min([pool.num_free for pool in self._pools])

    @property
    def only_pool(self) -> BlockPool:
        """The blocks of a model that has full attention alone. Raises ValueError for another one."""
        if len(self._pools) > 1 or not self._is_full or self._states is not None:
            raise ValueError("a sequence of this model needs more than the blocks of its prefix")
        return self._first

    @property
    def has_windows(self) -> bool:
        """Whether prompts get blocks chunk by chunk."""
        return bool(self._windows)

    @property
    def has_changed(self) -> bool:
        """Whether block tables have changed since blocks were last provided."""
        return bool(self._forked or self._freed)

    def reusable(self, sequence: CachedSequence) -> list[Digest]:
        """The digests of all blocks that a sequence need not compute if the cache has them."""
        return sequence.digests(self._num_reusable(sequence), self.block_size)

    def cached(self, sequence: CachedSequence) -> Prefix:
        """What a sequence may start with. None of it is acquired yet."""
        return self._match(self.reusable(sequence))

    def should_await_prefix(self, sequence: CachedSequence) -> bool:
        """Whether a running sequence is computing the very block that this one would have to start with.

        With recurrent layers: the last block that this one has in common, after which a snapshot will be taken for it.
        """
        if sequence.awaited is None or not self._first.is_pending(sequence.awaited):
            digests = self.reusable(sequence)
            sequence.awaited = self._awaitable(digests, self._match(digests).num_blocks)
        if sequence.awaited is not None and self._cuts_prompts:
            self._wanted.want(sequence.awaited)
        return sequence.awaited is not None

    @property
    def takes_snapshots(self) -> bool:
        """Whether prompts are cut where snapshots of recurrent state are due."""
        return self._cuts_prompts

    def look_ahead(self, sequence: CachedSequence, waiting: Iterable[CachedSequence]) -> None:
        """Have snapshots taken where those who wait part from a sequence that was just given its blocks."""
        own = sequence.digests(sequence.num_tokens // self.block_size, self.block_size)
        for other in waiting:
            common = num_common(own, self.reusable(other))
            if common - sequence.num_registered >= SPACING_BLOCKS:
                self._wanted.want(own[common - 1])

    def has_room(self, sequence: CachedSequence, prefix: Prefix, num_spare: int) -> bool:
        """Whether the tokens of a sequence that finds `prefix` fit in the free blocks, with `num_spare` left over."""
        total = self._first.blocks_for(sequence.num_tokens)
        fresh = [total - prefix.num_blocks] * len(self._pools)
        for window in self._windows:
            found = len(prefix.blocks[window.group])
            most = min(window.max_blocks(self._max_chunk_tokens), self._pools[window.group].num_blocks)
            fresh[window.group] = min(fresh[window.group], max(most - found, 1))
        return all(
            count + pool.num_unreferenced(cached) + num_spare <= pool.num_free
            for count, cached, pool in zip(fresh, prefix.blocks, self._pools, strict=True)
        )

    def allocate(self, sequence: CachedSequence, prefix: Prefix) -> None:
        """Give a sequence blocks for all of its tokens, `prefix` first, and announce what it is about to compute.

        Groups with windows give only what they have of the prefix: see `ensure_slots`.
        """
        start, total = prefix.num_blocks, self._first.blocks_for(sequence.num_tokens)
        width = self._first.blocks_for(sequence.max_length)
        sequence.block_tables = np.repeat(self._padding, width, axis=1)
        sequence.first_blocks = [start - len(blocks) for blocks in prefix.blocks]
        for table, first, pool, blocks in zip(
            sequence.block_tables, sequence.first_blocks, self._pools, prefix.blocks, strict=True
        ):
            pool.acquire(blocks)
            table[first:start] = blocks
        sequence.num_blocks = sequence.num_window_blocks = sequence.num_registered = start
        sequence.num_computed = start * self.block_size
        if self._is_full:
            sequence.block_tables[0, start:total] = self._first.allocate(total - start)
            sequence.num_blocks = total
        if self._states is not None:
            digests = sequence.digests(start, self.block_size)
            sequence.state_slot = self._states.start(digests[-1] if start else None)
            if self._cuts_prompts:
                common = prefix.num_common * self.block_size
                sequence.snapshots = SnapshotPlan.of(
                    sequence.num_tokens, sequence.num_computed, common, self.block_size
                )
        if self._prefix_caching:
            full = sequence.digests(sequence.num_tokens // self.block_size, self.block_size)
            sequence.announced = full[: start - 1 : -1] if start else full[::-1]
            self._first.announce(sequence.announced)

    def chunk_tokens(self, sequence: CachedSequence, num_tokens: int) -> int:
        """How many of the next `num_tokens` of a prompt to compute in a step, which ends where a snapshot is due."""
        if not self._cuts_prompts:
            return num_tokens
        start = sequence.num_computed
        num_tokens = sequence.snapshots.chunk(start, num_tokens)
        return self._wanted.chunk(start, num_tokens, lambda count: sequence.digests(count, self.block_size))

    def decode_tokens(self, sequence: CachedSequence, num_tokens: int) -> int:
        """How many of the next `num_tokens` a step decodes: it passes no block end where a snapshot is due."""
        if not self._cuts_prompts:
            return num_tokens
        return min(num_tokens, sequence.snapshots.next_after(sequence.num_computed) - sequence.num_computed)

    def ensure_slots(self, sequence: CachedSequence, num_tokens: int, num_spare: int = 0) -> int:
        """Give a sequence blocks with windows for `num_tokens`, or all that are free except `num_spare`.

        Returns how many of these tokens it has blocks for in all groups.
        """
        if not self._windows:
            return num_tokens
        start = sequence.num_window_blocks
        wanted = self._first.blocks_for(num_tokens) - start
        free = min([self._pools[window.group].num_free for window in self._windows])
        count = max(min(wanted, free - num_spare), 0)
        for window in self._windows:
            sequence.block_tables[window.group, start : start + count] = self._pools[window.group].allocate(count)
        sequence.num_window_blocks += count
        sequence.num_blocks = max(sequence.num_blocks, sequence.num_window_blocks)
        return min(num_tokens, sequence.num_window_blocks * self.block_size)

    def advance(self, sequence: CachedSequence) -> None:
        """Let the prefix cache know the blocks that a sequence has filled, and free those behind its windows."""
        if self._prefix_caching:
            registered = self._register_full(sequence)
            if self._states is not None and sequence.num_computed % self.block_size == 0:
                self._take_snapshot(sequence, self._states)
            self._wanted.drop(registered)
        for window in self._windows:
            group = window.group
            held, seen = sequence.first_blocks[group], window.first_block(sequence.num_computed)
            if seen > held:
                table = sequence.block_tables[group]
                self._pools[group].release(table[held:seen].tolist())
                table[held:seen] = self._padding[group]
                sequence.first_blocks[group] = seen
                self._freed.add(sequence.key)

    def fork(self, sequence: CachedSequence, fork: CachedSequence) -> None:
        """Replace the blocks of `fork` by those of `sequence`, as it is to `become` that sequence."""
        for group, pool in enumerate(self._pools):
            wanted, held = self._held(sequence, group), self._held(fork, group)
            common = 0
            while common < min(len(held), len(wanted)) and held[common] == wanted[common]:
                common += 1
            pool.acquire(wanted[common:])
            pool.release(held[common:])
        if self._states is not None:
            fork.state_slot = self._states.fork(sequence.state_slot, fork.state_slot)
        self._forked |= {sequence.key: sequence, fork.key: fork}

    def release(self, sequence: CachedSequence) -> None:
        """Take a sequence's blocks back, and what it has announced."""
        self._first.retract(sequence.announced)
        self._wanted.drop(sequence.announced)
        sequence.announced = []
        for group, pool in enumerate(self._pools):
            pool.release(self._held(sequence, group))
        if self._states is not None and sequence.state_slot >= 0:
            self._states.end(sequence.state_slot)
            sequence.state_slot = -1
        sequence.block_tables = np.empty((0, 0), np.int32)
        sequence.first_blocks = []
        sequence.num_blocks = sequence.num_window_blocks = sequence.num_registered = sequence.num_computed = 0
        self._forked.pop(sequence.key, None)
        self._freed.discard(sequence.key)

    def blocks_needed(self, decoding: Iterable[S]) -> tuple[list[S], list[CachedSequence]]:
        """Those of `decoding` that need a block more for their last token, and those that need a copy of their last."""
        block_size = self.block_size
        short = [s for s in decoding if s.num_tokens > s.num_blocks * block_size]
        holders: dict[int, list[CachedSequence]] = defaultdict(list)
        for sequence in self._forked.values():
            if sequence.num_computed % block_size:
                holders[int(sequence.block_tables[0, sequence.num_computed // block_size])].append(sequence)
        return short, [sequence for sharing in holders.values() for sequence in sharing[1:]]

    def extend(self, sequence: CachedSequence, num_tokens: int, num_spare: int) -> int:
        """Give a decoding sequence blocks for `num_tokens`, or all that are free except `num_spare`.

        Returns how many tokens it has blocks for.
        """
        wanted = self._first.blocks_for(num_tokens) - sequence.num_blocks
        count = min(wanted, self.num_free - num_spare)
        if count > 0:
            self._add_blocks(sequence, count)
        return sequence.num_blocks * self.block_size

    def allocate_needed(self, short: Seq[CachedSequence], sharing: Seq[CachedSequence]) -> tuple[Copies, set[int]]:
        """Give each sequence of `blocks_needed` a block, which all groups must have free.

        Returns the copies to make, and the keys of sequences whose block tables may have changed since the last time.
        """
        copies: Copies = defaultdict(list)
        for sequence in short:
            self._add_blocks(sequence, 1)
        for sequence in sharing:
            last = sequence.num_computed // self.block_size
            for group, pool in enumerate(self._pools):
                shared, own = int(sequence.block_tables[group, last]), pool.allocate(1)[0]
                copies[group].append((shared, own))
                sequence.block_tables[group, last] = own
                pool.release([shared])
        moved = {sequence.key for sequence in short} | self._forked.keys() | self._freed
        self._forked, self._freed = {}, set()
        return dict(copies), moved

    def take_state_copies(self) -> list[tuple[int, int]]:
        """The slots of state to copy before the next step, `(from, to)`, one after the other."""
        return [] if self._states is None else self._states.take_copies()

    def forget(self) -> None:
        """Drop the content of every block from the cache; blocks that sequences hold stay theirs."""
        for pool in self._pools:
            pool.forget()
        if self._states is not None:
            self._states.forget()

    def _match(self, digests: list[Digest]) -> Prefix:
        """The longest prefix for which all groups have the blocks that the next token sees."""
        full = self._first.match(digests) if self._is_full else []
        count = len(full) if self._is_full else len(digests)
        common = len(full)
        while True:
            while self._states is not None and count and not self._states.has(digests[count - 1]):
                count -= 1
            blocks = [full[:count]] if self._is_full else []
            for window in self._windows:
                first = window.first_block(count * self.block_size)
                found = self._pools[window.group].match(digests[first:count])
                blocks.append(found)
                if first + len(found) < count:
                    count = first + len(found)  # no prefix in between does without the block that is missing
                    break
            else:
                return Prefix(count, blocks, common)

    def _awaitable(self, digests: list[Digest], num_cached: int) -> Digest | None:
        """The block worth waiting for, for a sequence with these blocks, of which the first `num_cached` are cached."""
        if not self._cuts_prompts:
            missing = digests[num_cached] if num_cached < len(digests) else None
            return missing if missing is not None and self._first.is_pending(missing) else None
        # A sequence goes on only from a snapshot: the one after the last block that both have.
        common = num_cached
        while common < len(digests) and (
            self._first.is_pending(digests[common]) or self._first.match(digests[common : common + 1])
        ):
            common += 1
        worth = common - num_cached >= SPACING_BLOCKS and self._first.is_pending(digests[common - 1])
        return digests[common - 1] if worth else None

    def _register_full(self, sequence: CachedSequence) -> list[Digest]:
        """The digests of the blocks that have become full."""
        full = sequence.num_computed // self.block_size
        registered = sequence.digests(full, self.block_size)[sequence.num_registered : full]
        for i in range(sequence.num_registered, full):
            digest = sequence.digests(i + 1, self.block_size)[i]
            for pool, table in zip(self._pools, sequence.block_tables, strict=True):
                pool.register(int(table[i]), digest)
            if sequence.announced:
                self._first.retract([sequence.announced.pop()])
        sequence.num_registered = full
        return registered

    def _take_snapshot(self, sequence: CachedSequence, states: StateSlots) -> None:
        plan, at = sequence.snapshots, sequence.num_computed
        digest = sequence.digests(sequence.num_registered, self.block_size)[-1]
        lasts = plan.lasts(at) or digest in self._wanted
        if not lasts and not plan.passes(at):
            return
        if lasts:
            states.keep(sequence.state_slot, digest)
            sequence.snapshots = plan.taken(at)
        else:
            states.keep(sequence.state_slot, digest, instead_of=plan.passing)
            sequence.snapshots = plan.taken(at, passing=digest)

    def _add_blocks(self, sequence: CachedSequence, count: int) -> None:
        """The tables of all groups are of the same length by now: the prompt is computed."""
        end = sequence.num_blocks + count
        for pool, table in zip(self._pools, sequence.block_tables, strict=True):
            table[sequence.num_blocks : end] = pool.allocate(count)
        sequence.num_blocks = sequence.num_window_blocks = end

    def _held(self, sequence: CachedSequence, group: int) -> list[int]:
        if not sequence.num_blocks:
            return []
        full = self._is_full and group == 0
        end = sequence.num_blocks if full else sequence.num_window_blocks
        held: list[int] = sequence.block_tables[group, sequence.first_blocks[group] : end].tolist()
        return held

    def _num_reusable(self, sequence: CachedSequence) -> int:
        return sequence.num_reusable // self.block_size if self._prefix_caching else 0
