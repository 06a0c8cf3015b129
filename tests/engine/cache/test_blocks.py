"""The block pool's promises: the books always balance, content is found again, and the oldest goes first."""

from __future__ import annotations

import numpy as np
import pytest
from engine.books import check_pool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidewheel.engine.cache.blocks import BlockPool
from tidewheel.engine.cache.identity import Identity


def chain(*token_lists: list[int]) -> list[bytes]:
    identity, digests = Identity(), [Identity().root]
    for tokens in token_lists:
        digests.append(identity.block_digest(digests[-1], 0, np.array(tokens, dtype=np.int32)))
    return digests[1:]


def test_a_released_block_is_found_again_until_it_is_reused() -> None:
    pool = BlockPool(3, 2)
    digests = chain([1, 2], [3, 4])
    blocks = pool.allocate(2)
    for block, digest in zip(blocks, digests, strict=True):
        pool.register(block, digest)
    pool.release(blocks)
    assert pool.match(digests) == blocks
    assert pool.num_unreferenced(blocks) == 2
    pool.acquire(blocks)
    assert pool.num_used == 2
    pool.release(blocks)
    pool.allocate(3)
    assert pool.match(digests) == []


def test_blocks_without_content_are_reused_first_then_the_least_recently_used_tail_first() -> None:
    pool = BlockPool(5, 2)
    old, new, plain = pool.allocate(2), pool.allocate(2), pool.allocate(1)
    for block, digest in zip(old + new, chain([1, 2], [3, 4]) + chain([5, 6], [7, 8]), strict=True):
        pool.register(block, digest)
    pool.release(old)
    pool.release(new)
    pool.release(plain)
    assert pool.allocate(5) == [plain[0], old[1], old[0], new[1], new[0]]


def test_a_shared_block_stays_used_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(1, 2)
    (digest,) = chain([1, 2])
    blocks = pool.allocate(1)
    pool.register(blocks[0], digest)
    pool.acquire(pool.match([digest]))
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_free == 1


def test_the_first_of_two_equal_blocks_is_the_cached_one() -> None:
    pool = BlockPool(2, 2)
    (digest,) = chain([1, 2])
    first, second = pool.allocate(2)
    pool.register(first, digest)
    pool.register(second, digest)
    assert pool.match([digest]) == [first]
    check_pool(pool, [[first, second]])


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(2, 2)
    with pytest.raises(MemoryError, match="3 KV blocks wanted, 2 of 2"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(blocks)


def test_pending_content_is_pending_until_every_announcement_is_taken_back() -> None:
    pool = BlockPool(2, 2)
    first, second = chain([1, 2], [3, 4])
    pool.announce([first, second])
    pool.announce([first])
    pool.retract([first])
    assert pool.is_pending(first)
    pool.retract([first, second])
    assert not pool.is_pending(first)
    assert not pool.is_pending(second)


def test_what_is_forgotten_is_not_found_and_stays_its_holders() -> None:
    pool = BlockPool(3, 2)
    digests = chain([1, 2], [3, 4])
    blocks = pool.allocate(2)
    for block, digest in zip(blocks, digests, strict=True):
        pool.register(block, digest)
    pool.release(blocks[1:])
    pool.forget()
    assert pool.match(digests) == []
    check_pool(pool, [blocks[:1]])
    pool.register(blocks[0], digests[0])
    assert pool.match(digests) == blocks[:1]


class PoolMachine(RuleBasedStateMachine):
    """Sequences of a toy alphabet come, share, fill and go; the pool's books balance after every move."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 1)
        self.held: list[tuple[list[bytes], list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def begin(self, tokens: list[int]) -> None:
        digests = chain(*([token] for token in tokens))
        cached = self.pool.match(digests)
        if len(digests) - len(cached) + self.pool.num_unreferenced(cached) > self.pool.num_free:
            return
        self.pool.acquire(cached)
        fresh = self.pool.allocate(len(digests) - len(cached))
        assert not set(fresh) & set(cached)
        self.held.append((digests, cached + fresh))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        digests, blocks = data.draw(st.sampled_from(self.held))
        for block, digest in zip(blocks, digests, strict=True):
            self.pool.register(block, digest)
        assert len(self.pool.match(digests)) == len(digests)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index)[1])

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert all(self.pool.match(digests) == [] for digests, _ in self.held)

    @invariant()
    def books_balance(self) -> None:
        check_pool(self.pool, [blocks for _, blocks in self.held])


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, deadline=None)
