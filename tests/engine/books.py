"""What must hold of the scheduler's queues and the cache's blocks between two steps: drivers check it after each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidewheel.engine.cache.blocks import BlockPool
from tidewheel.engine.cache.manager import CachedSequence, CacheManager
from tidewheel.engine.scheduling.beams import Beams
from tidewheel.engine.scheduling.fair_share import FairShares
from tidewheel.engine.scheduling.forks import Forks
from tidewheel.engine.scheduling.running import Running
from tidewheel.engine.scheduling.scheduler import Scheduler
from tidewheel.engine.scheduling.waiting import WaitingQueue
from tidewheel.engine.sequences.sequence import Sequence as QueuedSequence
from tidewheel.engine.sequences.sequence import SequenceState


def check_scheduler(scheduler: Scheduler) -> None:
    """Queues and blocks agree with each other."""
    running, waiting = scheduler._running.sequences(), scheduler._waiting.sequences()
    waiting += _forks(scheduler._forks) + _idle(scheduler._beams)
    _check_running(scheduler._running)
    _check_beams(scheduler._beams)
    _check_waiting(scheduler._waiting)
    _check_shares(scheduler)
    assert scheduler._prompts.num_taken <= scheduler._prompts.max_num_seqs
    assert sorted(s.key for s in running + waiting) == sorted(scheduler._sequences)
    assert all(s.num_blocks == s.num_computed == 0 and not s.announced for s in waiting)
    check_cache(scheduler.cache, running)


def check_cache(cache: CacheManager, holders: Sequence[CachedSequence]) -> None:
    """The books balance, given all sequences that hold blocks."""
    for group, pool in enumerate(cache._pools):
        check_pool(pool, [cache._held(sequence, group) for sequence in holders])
    if cache._states is not None:
        check_pool(cache._states._pool, [[sequence.state_slot] for sequence in holders])
    for sequence in holders:
        assert sequence.num_computed <= sequence.num_blocks * cache.block_size
        for group, table in enumerate(sequence.block_tables):
            first, padding = sequence.first_blocks[group], cache._padding[group]
            held = table[first : first + len(cache._held(sequence, group))]
            assert (held != padding).all()
            assert (table == padding).sum() == len(table) - len(held), "a freed block is still in its table"
    for window in cache._windows:
        for sequence in holders:
            assert sequence.first_blocks[window.group] <= window.first_block(sequence.num_computed)
            assert sequence.num_computed <= sequence.num_window_blocks * cache.block_size


def check_pool(pool: BlockPool, holders: Iterable[Sequence[int]]) -> None:
    """The books balance, given the blocks of every sequence that holds some."""
    counts = [0] * pool.num_blocks
    for blocks in holders:
        for block in blocks:
            counts[block] += 1
    assert counts == pool._ref_counts, "reference counts differ from what the sequences hold"
    assert all((pool._ref_counts[block] == 0) == (block in pool._free) for block in range(pool.num_blocks)), (
        "a block is free exactly when nobody holds it"
    )
    assert pool.num_free + pool.num_used == pool.num_blocks
    assert all(pool._digests[block] == digest for digest, block in pool._cached.items())
    assert sum(digest is not None for digest in pool._digests) == len(pool._cached)
    assert all(count > 0 for count in pool._pending.values())


def _check_running(running: Running) -> None:
    """The sequences are at what they should be at."""
    assert all(s.state is SequenceState.PREFILLING for s in running.prefilling)
    assert all(s.state is SequenceState.DECODING for s in running.decoding)
    assert all(s.num_computed == s.num_tokens - 1 for s in running.decoding)


def _check_beams(beams: Beams) -> None:
    """The beams of every search are as long as each other."""
    assert all(group in beams._groups.values() for group in beams._active)
    assert all(len({s.num_tokens for s in group.live}) == 1 for group in beams._active)


def _forks(forks: Forks) -> list[QueuedSequence]:
    """The sequences that wait for another."""
    return [fork for some in forks._forks.values() for fork in some if fork.state is SequenceState.WAITING]


def _idle(beams: Beams) -> list[QueuedSequence]:
    """The sequences of all searches that compute no beam at present."""
    return [s for group in beams._groups.values() for s in group.sequences if s not in group.live]


def _check_waiting(waiting: WaitingQueue) -> None:
    """The next turn is the first of all."""
    assert all(line[0][1].state is SequenceState.WAITING for line in waiting._lines.values())
    assert waiting._num_entries == sum(len(line) for line in waiting._lines.values())
    assert sorted([*waiting._turns, *waiting._changed, *waiting._new]) == sorted(waiting._lines)
    if (first := waiting.peek()) is not None and len(waiting._lines) > 1:
        heads = [line[0] for line in waiting._lines.values()]
        turns = [(waiting._shares.served(s) + waiting._num_to_compute(s), order) for order, s in heads]
        assert first is min(zip([order[0] for order, _ in heads], turns, heads, strict=True))[2][1]


def _check_shares(scheduler: Scheduler) -> None:
    """Exactly the clients of the scheduler's sequences are known."""
    shares: FairShares = scheduler._shares
    sequences = list(scheduler._sequences.values())
    known = {(priority, client) for priority, clients in shares._priorities.items() for client in clients.served}
    assert known == {(sequence.priority, sequence.client) for sequence in sequences}
    assert sum(sum(clients.num_sequences.values()) for clients in shares._priorities.values()) == len(sequences)
