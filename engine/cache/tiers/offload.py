"""Offload: when KV blocks go to disk, and which sequences wait until theirs have come back.

A block is saved when no sequence holds it any more: between steps, or at the latest when it is given to something
else. What is on disk already is not written again. A prompt whose prefix is on disk waits while it is read, if that is
expected to take less time than computing it. What has been read becomes a cached block that no sequence holds, like
those that other sequences have left. So nothing has to be undone if the prompt is aborted meanwhile, and other
sequences may take these blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ...devices.executor import Executor
from ..identity import Digest
from ..manager import CachedSequence, CacheManager, Prefix
from .disk import DiskTier, Reading, TierStats

_STEP_SHARE = 0.1  # of the longest step, for copies before it
_BATCH_BYTES = 8 << 20  # copied without looking at the clock
_MAX_LOOKED_AT = 4096  # blocks that are on disk already, in one batch
_MAX_READINGS = 16
_LONGEST_READING_S = 5.0
_LONGEST_SAVING_S = 5.0  # when the server stops


class Turn(Protocol):
    """A thread's turns on cores that several models share: see `hosting/turns.py`."""

    def take(self) -> object:
        """Wait for the cores."""

    def give_back(self) -> None:
        """Leave them to others."""


class OffloadStats(Struct, frozen=True):
    """`tokens_missed` of prompts were not in memory, and `tokens_found` of them came from the tier."""

    tier: TierStats
    tokens_missed: int
    tokens_found: int


class _Restoring(Struct):
    """A sequence's blocks on their way from disk."""

    digests: list[Digest]  # up to the last one that is read
    num_restored: int  # how many of them are in memory; some were there before
    reading: Reading
    deadline: float


class Offload:
    """Saves and restores the blocks of `cache`. All but `stats` is called on the engine thread."""

    longest_close_s = _LONGEST_SAVING_S

    def __init__(
        self,
        tier: DiskTier,
        cache: CacheManager,
        executor: Executor,
        *,
        max_step_ms: float,
        computing_ms: Callable[[int, int], float | None],
    ) -> None:
        """`computing_ms(start, count)` is how long it takes to compute tokens of a prompt; None if that is unknown."""
        self._tier = tier
        self._cache = cache
        self._executor = executor
        self._computing_ms = computing_ms
        self._pool = cache.only_pool
        self._watch = self._pool.watch()
        self._copying_s = max_step_ms * 1e-3 * _STEP_SHARE
        self._batch_blocks = max(_BATCH_BYTES // executor.block_bytes, 1)
        self._restoring: dict[int, _Restoring] = {}  # by the key of the sequence that waits for it
        self._being_read: set[Digest] = set()
        self._tried: dict[int, int] = {}  # tokens, by sequence key: it does not wait again while it has as many
        self._tokens_missed = self._tokens_found = 0

    @property
    def waits_until(self) -> float | None:
        """When the next waiting sequence goes on at the latest (`time.perf_counter`); None if none waits."""
        return min([restoring.deadline for restoring in self._restoring.values()], default=None)

    def should_wait(self, sequence: CachedSequence, prefix: Prefix) -> bool:
        """Whether a sequence that could run with `prefix` had better wait for blocks from disk, which are read then."""
        if sequence.key in self._restoring:
            return True
        if self._tried.get(sequence.key) == sequence.num_tokens:
            return False
        digests, start = self._cache.reusable(sequence), prefix.num_blocks
        missing = digests[start:]
        if missing and missing[0] in self._being_read:
            return True
        if len(self._restoring) >= _MAX_READINGS:
            return False
        self._tried[sequence.key] = sequence.num_tokens
        self._tokens_missed += len(missing) * self._cache.block_size
        count = self._tier.num_held(missing)
        limit_s = self._worth_waiting_s(start, count) if count else 0.0
        if not limit_s:
            return False
        reading = self._tier.read(missing[:count])
        deadline = time.perf_counter() + limit_s
        self._restoring[sequence.key] = _Restoring(digests[: start + count], start, reading, deadline)
        self._being_read.update(reading.digests)
        return True

    def end(self, key: int) -> None:
        """Forget a sequence that has ended."""
        self._tried.pop(key, None)
        self._stop(key)

    def restore(self, num_running: int) -> None:
        """Put what has been read into free blocks, before a step is chosen.

        Leaves a block for each of `num_running` sequences to grow into, and takes little of their time.
        """
        until = time.perf_counter() + self._copying_s
        for key, restoring in list(self._restoring.items()):
            while (piece := self._tier.take(restoring.reading)) is not None:
                if not self._put(restoring, piece, num_running):
                    self._stop(key)
                elif num_running and time.perf_counter() > until:
                    return
            if restoring.reading.is_over or time.perf_counter() > restoring.deadline:
                self._stop(key)

    def save_before_step(self) -> None:
        """Save what the next step may write over, and what else there is time for."""
        until = time.perf_counter() + self._copying_s
        self._save_evicted(until)
        while time.perf_counter() < until and self.save_idle():
            pass

    @property
    def has_idle(self) -> bool:
        """Whether there are blocks that no sequence holds, and that may not be saved yet."""
        return bool(self._watch.idle)

    def save_idle(self) -> bool:
        """Save some blocks that no sequence holds; whether there are more that can be saved now."""
        idle = self._watch.idle
        most = min(self._batch_blocks, self._tier.room)
        batch: list[tuple[Digest, int]] = []
        known: list[Digest] = []
        while idle and len(batch) < most and len(known) < _MAX_LOOKED_AT:
            digest = idle.popitem(last=False)[0]
            if self._tier.knows(digest):
                known.append(digest)
            else:
                batch += [(digest, block) for block in self._pool.match([digest])]
        if known:
            self._tier.touch(known)
        self._copy(batch)
        if not self._tier.is_on:
            self._watch.clear()
        return bool(idle) and self._tier.room > 0

    def forget(self) -> None:
        """Drop all content, in the cache and on disk. Nothing that is on its way is put into the cache."""
        for key in list(self._restoring):
            self._stop(key)
        self._cache.forget()
        self._tier.clear()

    def stats(self) -> OffloadStats:
        """Figures for metrics; may be called from any thread."""
        return OffloadStats(self._tier.stats(), self._tokens_missed, self._tokens_found)

    def close(self, *, saving: bool, turn: Turn | None = None) -> None:
        """Save what is left, if that is wanted, in a bounded time, and leave the folder to others.

        Blocks are copied on cores for which it has to wait its `turn`.
        """
        deadline = time.perf_counter() + _LONGEST_SAVING_S
        for key in list(self._restoring):
            self._stop(key)
        while saving and self._watch.idle and (left_s := deadline - time.perf_counter()) > 0:
            if turn is not None:
                turn.take()
            has_room = self.save_idle()
            if turn is not None:
                turn.give_back()
            if not has_room and self._watch.idle and not self._tier.wait_for_room(left_s):
                break
        self._tier.drop(len(self._watch.idle))
        self._tier.close(max(deadline - time.perf_counter(), 0.0))

    def _worth_waiting_s(self, start: int, count: int) -> float:
        """The longest to wait for `count` blocks; 0 if computing them is expected to take no longer."""
        block_size = self._cache.block_size
        computing_ms = self._computing_ms(start * block_size, count * block_size)
        if computing_ms is None:
            return _LONGEST_READING_S
        reading_s, computing_s = self._tier.seconds_to_read(count), computing_ms * 1e-3
        if reading_s is not None and reading_s >= computing_s:
            return 0.0
        return min(computing_s, _LONGEST_READING_S)

    def _put(self, restoring: _Restoring, piece: NDArray[np.uint8], num_running: int) -> bool:
        """Make cached blocks of what was read; whether there was room, and all that comes before is still cached."""
        pool, first, count = self._pool, restoring.num_restored, len(piece)
        before = pool.match(restoring.digests[:first])
        if len(before) < first or pool.num_free - pool.num_unreferenced(before) < count + num_running:
            return False
        pool.acquire(before)
        fresh = pool.allocate(count)
        self._save_evicted(time.perf_counter() + self._copying_s)
        self._executor.write_blocks(np.array(fresh, np.int32), piece)
        for block, digest in zip(fresh, restoring.digests[first : first + count], strict=True):
            pool.register(block, digest)
        pool.release(before + fresh)  # as one sequence: its last blocks are reused first
        restoring.num_restored += count
        self._tokens_found += count * self._cache.block_size
        return True

    def _stop(self, key: int) -> None:
        restoring = self._restoring.pop(key, None)
        if restoring is not None:
            self._tier.cancel(restoring.reading)
            self._being_read = {d for r in self._restoring.values() for d in r.reading.digests}

    def _save_evicted(self, until: float) -> None:
        evicted, self._watch.evicted = self._watch.evicted, []
        unknown = [(digest, block) for digest, block in evicted if not self._tier.knows(digest)]
        saved = 0
        while saved < len(unknown) and self._tier.room > 0 and time.perf_counter() < until:
            batch = unknown[saved : saved + min(self._batch_blocks, self._tier.room)]
            self._copy(batch)
            saved += len(batch)
        self._tier.drop(len(unknown) - saved)

    def _copy(self, blocks: Seq[tuple[Digest, int]]) -> None:
        if blocks:
            data = self._executor.read_blocks(np.array([block for _, block in blocks], np.int32))
            self._tier.write([digest for digest, _ in blocks], data)
