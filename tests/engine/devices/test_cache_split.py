"""The KV cache's memory is all used, windows have what they can use, and plan and split agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.devices.cache_split import CacheSplit, GroupBytes
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
