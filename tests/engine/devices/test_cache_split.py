"""The KV cache's memory is all used, windows have what they can use, and plan and split agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.devices.cache_split import CacheSplit, GroupBytes, StateSplit
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.errors import DeviceError

BLOCK = 16


def split(*groups: tuple[int | None, int], seqs: int = 4, tokens: int = 64) -> CacheSplit:
    return CacheSplit([GroupBytes(*group) for group in groups], BLOCK, seqs, tokens)


def test_one_group_has_all_blocks() -> None:
    for window in (None, 100):
        assert split((window, 10)).blocks(1000 * BLOCK * 10 + 159) == [1000]


def test_a_window_has_what_it_can_use_and_full_attention_the_rest() -> None:
    groups = split((None, 10), (33, 10))
    # 4 sequences: 3 blocks that one token may see, and 2 as a block fills; and 4 blocks of a step's tokens
    assert groups.blocks(1000 * BLOCK * 10) == [976, 24]
    assert groups.blocks(20 * BLOCK * 10) == [10, 10]


def test_not_one_block_of_each_is_an_error() -> None:
    with pytest.raises(DeviceError, match="holds no block of 320 bytes; raise --kv-cache-space"):
        split((None, 10), (33, 10)).blocks(319)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 50)), max_size=3, unique_by=lambda group: group[0]),
    st.integers(1, 50),
    st.integers(0, 10**6),
)
def test_a_split_takes_no_more_than_there_is_and_leaves_less_than_a_block(
    windows: list[tuple[int, int]], full: int, spare: int
) -> None:
    sizes = [(None, full), *sorted(windows, reverse=True)]
    groups = split(*sizes)
    available = groups.bytes_with(1) + spare
    blocks = groups.blocks(available)
    taken = sum(count * BLOCK * size for count, (_, size) in zip(blocks, sizes, strict=True))
    assert taken == groups.bytes_with(blocks[0]) <= available < groups.bytes_with(blocks[0] + 1)


@given(st.integers(1, 64), st.integers(1, 10**6), st.integers(0, 10**8), st.booleans())
def test_states_take_at_most_half_beside_kv_and_leave_some_for_snapshots(
    max_num_seqs: int, state_bytes: int, cache_bytes: int, beside_kv: bool
) -> None:
    room = cache_bytes // 2 if beside_kv else cache_bytes
    if room < 2 * state_bytes:
        with pytest.raises(DeviceError, match="at least 2 are needed; raise --kv-cache-space"):
            StateSplit.within(cache_bytes, state_bytes, max_num_seqs, beside_kv=beside_kv)
        return
    found = StateSplit.within(cache_bytes, state_bytes, max_num_seqs, beside_kv=beside_kv)
    assert found.num_bytes == found.num_states * state_bytes <= room
    assert 1 <= found.max_num_seqs <= max_num_seqs
    assert found.num_states - found.max_num_seqs >= max(found.num_states // 4, 1)


def test_the_limits_have_the_states_and_the_blocks_that_are_left() -> None:
    options = ExecutorOptions("float32", 100_000, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)
    limits = options.limits([GroupBytes(None, 10)], BLOCK, state_bytes=10_000)
    assert (limits.num_states, limits.max_num_seqs) == (5, 3)
    assert limits.num_blocks == 50_000 // (10 * BLOCK)
    plain = options.limits([GroupBytes(None, 10)], BLOCK)
    assert (plain.num_states, plain.max_num_seqs, plain.num_blocks) == (0, 8, 100_000 // (10 * BLOCK))


def test_without_kv_all_of_the_cache_is_state_and_blocks_take_nothing() -> None:
    options = ExecutorOptions("float32", 100_000, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)
    limits = options.limits([GroupBytes(None, 0)], BLOCK, state_bytes=10_000)
    assert (limits.num_states, limits.max_num_seqs) == (10, 7)
    assert limits.num_blocks * BLOCK >= 7 * 64
    assert limits.max_context
    assert limits.max_context >= 64
