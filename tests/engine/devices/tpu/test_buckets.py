"""The sizes that steps are padded to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.declaring.option import OptionError
from tidewheel.engine.devices.tpu.buckets import max_sequences, page_size, row_buckets, smallest_holding, token_buckets
from tidewheel.engine.devices.tpu.options import TpuOptions


def test_steps_are_powers_of_two_from_16_until_one_holds_the_largest() -> None:
    assert token_buckets(2048) == (16, 32, 64, 128, 256, 512, 1024, 2048)
    assert token_buckets(100) == (16, 32, 64, 128)
    assert token_buckets(1) == (16,)


def test_with_a_gap_steps_grow_by_it() -> None:
    assert token_buckets(256, 64) == (16, 32, 64, 128, 192, 256)
    assert token_buckets(300, 96) == (16, 32, 64, 96, 192, 288, 384)


def test_rows_are_powers_of_two_from_8_and_the_most_sequences() -> None:
    assert row_buckets(100) == (8, 16, 32, 64, 100)
    assert row_buckets(64) == (8, 16, 32, 64)
    assert row_buckets(3) == (8,)


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 20).map(lambda n: 16 * n), st.data())
def test_every_step_has_the_smallest_size_that_holds_it(most: int, gap: int, data: st.DataObject) -> None:
    buckets = token_buckets(most, gap)
    assert list(buckets) == sorted(set(buckets))
    assert all(bucket % 16 == 0 for bucket in buckets)
    size = data.draw(st.integers(1, most))
    assert smallest_holding(buckets, size) == min(bucket for bucket in buckets if bucket >= size)


def test_a_step_larger_than_announced_is_refused() -> None:
    with pytest.raises(ValueError, match="33 is larger than the largest of 32"):
        smallest_holding((16, 32), 33)


def test_pages_are_a_16th_of_the_context_and_small_for_long_ones() -> None:
    assert [page_size(length, 8) for length in (100, 1024, 2048, 8192, 8193)] == [16, 64, 128, 256, 16]


@settings(deadline=None)
@given(st.integers(1, 1 << 20), st.integers(1, 512))
def test_tables_of_all_sequences_fit_into_scalar_memory(max_model_len: int, max_num_seqs: int) -> None:
    size = page_size(max_model_len, max_num_seqs)
    sequences = min(max_num_seqs, max_sequences(max_model_len, size))
    assert sequences == 1 or sequences * -(-max_model_len // size) * 4 <= 512 * 1024
    assert sequences == max_num_seqs or size == 256


def test_a_gap_that_is_no_multiple_of_16_is_refused() -> None:
    assert TpuOptions(tpu_bucket_padding_gap=64).tpu_bucket_padding_gap == 64
    with pytest.raises(OptionError, match="multiple of 16"):
        TpuOptions(tpu_bucket_padding_gap=100)
