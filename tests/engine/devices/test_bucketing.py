"""Buckets: which sizes a range has, that every step has one, and that it is the smallest."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.devices.bucket_file import plan_of_file
from tidewheel.engine.devices.bucketing import (
    Bucket,
    BucketPlan,
    BucketRange,
    BucketRanges,
    LeftOut,
    StepSizes,
    Strategy,
    exponential,
    linear,
    plan_of_ranges,
)
from tidewheel.engine.errors import DeviceError

strategies = st.sampled_from(get_args(Strategy))
sizes_of_steps = st.builds(
    StepSizes,
    block_size=st.sampled_from([1, 16, 128]),
    max_model_len=st.integers(1, 600),
    max_num_seqs=st.integers(1, 40),
    max_num_batched_tokens=st.integers(1, 600),
    max_prefill_seqs=st.none() | st.integers(1, 4),
)
ranges = st.builds(
    lambda low, step, more: BucketRange(low, step, low + more),
    st.integers(1, 50),
    st.integers(1, 50),
    st.integers(0, 500),
)


def example(prompts: BucketRange, seq: BucketRange, decodes: BucketRange, decode_seq: BucketRange) -> BucketRanges:
    return BucketRanges(prompts, seq, decodes, decode_seq, "seq")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2, 32, 64), [2, 4, 8, 16, 32, 64]),
        ((128, 128, 512), [128, 256, 384, 512]),
        ((1, 32, 4), [1, 2, 4]),
        ((1, 32, 100), [1, 2, 4, 8, 16, 32, 64, 96]),
        ((3, 8, 24), [3, 6, 8, 16, 24]),
        ((100, 64, 300), [128, 192, 256]),
        ((1, 1, 3), [1, 2, 3]),
        ((8, 16, 8), [8]),
        ((100, 64, 120), []),
    ],
)
def test_a_linear_range_doubles_up_to_its_step_and_then_goes_by_steps(
    sizes: tuple[int, int, int], expected: list[int]
) -> None:
    assert linear(BucketRange(*sizes)) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 1, 256), [1, 2, 4, 8, 16, 32, 64, 128, 256]),
        ((128, 128, 1024), [128, 256, 384, 512, 640, 768, 896, 1024]),
        ((128, 128, 4096), [128, 256, 384, 512, 640, 768, 1024, 1408, 1792, 2304, 3072, 4096]),
        ((7, 5, 7), [7]),
        ((1, 1, 1), [1]),
    ],
)
def test_an_exponential_range_grows_by_one_factor(sizes: tuple[int, int, int], expected: list[int]) -> None:
    assert exponential(BucketRange(*sizes)) == expected


@settings(deadline=None)
@given(ranges)
def test_sizes_of_an_exponential_range_are_few_and_begin_and_end_with_its_bounds(sizes: BucketRange) -> None:
    found = exponential(sizes)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (sizes.min, sizes.max)
    assert all(size % sizes.step == 0 for size in found[1:-1])
    assert len(found) <= sizes.max.bit_length() + 1


def test_the_documented_ranges_give_24_prompts_and_48_decodes() -> None:
    sizes = StepSizes(128, 2048, 4, 4096)
    plan, left_out = plan_of_ranges(
        example(
            BucketRange(1, 32, 4), BucketRange(128, 128, 1024), BucketRange(1, 128, 4), BucketRange(128, 128, 2048)
        ),
        "linear",
        sizes,
    )
    assert [(b.batch_size, b.query_len) for b in plan.prompts] == [
        (batch_size, tokens) for batch_size in (1, 2, 4) for tokens in range(128, 1025, 128)
    ]
    assert [(b.batch_size, plan.decode_size(b)) for b in plan.decodes] == [
        (batch_size, tokens) for batch_size in (1, 2, 4) for tokens in range(128, 2049, 128)
    ]
    assert left_out == LeftOut(0, 0)
    assert plan.prompt(3, 412, 4) == Bucket(4, 512, 4)
    assert plan.decode(3, 4) == Bucket(4, 1, 4)
    assert plan.decode(2, 5) == Bucket(2, 1, 5)


def test_blocks_of_a_decode_are_those_of_all_its_sequences() -> None:
    sizes = StepSizes(16, 1600, 8, 2048)
    one = BucketRange(1, 1, 1)
    plan, _ = plan_of_ranges(
        BucketRanges(one, BucketRange(16, 16, 16), BucketRange(3, 4, 8), BucketRange(64, 64, 128), "block"),
        "linear",
        sizes,
    )
    assert plan.decodes == tuple(
        Bucket(*b) for b in [(3, 1, 22), (3, 1, 43), (4, 1, 16), (4, 1, 32), (8, 1, 8), (8, 1, 16)]
    )
    assert [plan.decode_size(b) for b in plan.decodes] == [66, 129, 64, 128, 64, 128]


def test_what_no_step_can_be_is_left_out_and_counted() -> None:
    plan, left_out = plan_of_ranges(
        example(BucketRange(1, 4, 8), BucketRange(16, 16, 64), BucketRange(1, 8, 64), BucketRange(16, 16, 128)),
        "linear",
        StepSizes(16, 64, 64, 48, max_prefill_seqs=2),
    )
    assert [b[:2] for b in plan.prompts] == [(1, 16), (1, 32), (1, 48), (2, 16)]
    assert {b.batch_size for b in plan.decodes} == {1, 2, 4, 8, 16, 24, 32, 40, 48}
    assert {b.width for b in plan.decodes} == {1, 2, 3, 4}
    assert left_out == LeftOut(prompts=4 * 4 - 4, decodes=11 * 8 - 9 * 4)


def test_a_prompt_behind_a_cached_part_has_tables_that_double() -> None:
    plan, _ = plan_of_ranges(
        example(BucketRange(1, 2, 2), BucketRange(32, 32, 64), BucketRange(1, 1, 1), BucketRange(16, 16, 16)),
        "linear",
        StepSizes(16, 400, 2, 128),
    )
    assert plan.contexts == tuple(Bucket(1, 32, w) for w in (4, 8, 16, 25)) + tuple(
        Bucket(1, 64, w) for w in (8, 16, 25)
    )
    assert plan.prompt(1, 20, 2) == Bucket(1, 32, 2)
    assert plan.prompt(1, 20, 3) == Bucket(1, 32, 4)
    assert plan.prompt(1, 33, 17) == Bucket(1, 64, 25)
    assert plan.prompt(2, 33, 4) == Bucket(2, 64, 4)
    assert plan.prompt(2, 33, 5) is None


@settings(max_examples=40, deadline=None)
@given(strategies, ranges, ranges, ranges, ranges, st.sampled_from(["seq", "block"]), sizes_of_steps, st.data())
def test_the_bucket_that_is_found_is_the_smallest_that_holds_the_launch(
    strategy: Strategy,
    prompt_batch: BucketRange,
    prompt_seq: BucketRange,
    decode_batch: BucketRange,
    decode_size: BucketRange,
    unit: str,
    sizes: StepSizes,
    data: st.DataObject,
) -> None:
    unit_of_decodes = "seq" if unit == "seq" else "block"
    plan, _ = plan_of_ranges(
        BucketRanges(prompt_batch, prompt_seq, decode_batch, decode_size, unit_of_decodes), strategy, sizes
    )
    batch_size, query_len = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 600))
    width = data.draw(st.integers(1, sizes.max_width))
    for found, buckets, launch in (
        (plan.prompt(batch_size, query_len, width), plan.prompts + plan.contexts, (batch_size, query_len, width)),
        (plan.decode(batch_size, width), plan.decodes, (batch_size, 1, width)),
    ):
        holding = [bucket for bucket in buckets if bucket.holds(*launch)]
        assert (found is None) == (not holding)
        if found is not None:
            assert found in holding
            assert found.num_tokens == min(bucket.num_tokens for bucket in holding)
            assert found.width == min(b.width for b in holding if b.num_tokens == found.num_tokens)
    for buckets in (plan.prompts, plan.contexts, plan.decodes):
        assert list(buckets) == sorted(set(buckets))
        assert all(bucket.num_tokens <= sizes.max_num_batched_tokens for bucket in buckets)
    assert all(bucket.width <= sizes.max_width for bucket in plan.decodes)


def test_an_empty_plan_has_no_bucket() -> None:
    plan = BucketPlan((), (), ())
    assert plan.prompt(1, 1, 1) is None
    assert plan.decode(1, 1) is None


FILE = """\
# prompts
(1, 2048, 0)
(1, [256, 512], [0, 4, 8])  # six of them

(64, 1, 1024)
([1, 2], 1, range(256, 512, 128))
(1, 1, range(3, 4))
"""


def test_buckets_are_read_from_a_file() -> None:
    plan, left_out = plan_of_file("f", FILE.splitlines(), StepSizes(128, 65536, 64, 2048))
    assert plan.prompts == (Bucket(1, 256, 2), Bucket(1, 512, 4), Bucket(1, 2048, 16))
    assert plan.contexts == (Bucket(1, 256, 6), Bucket(1, 256, 10), Bucket(1, 512, 8), Bucket(1, 512, 12))
    one, two = ([Bucket(n, 1, blocks // n) for blocks in (256, 384, 512)] for n in (1, 2))
    assert plan.decodes == (Bucket(1, 1, 3), Bucket(1, 1, 4), *one, *two, Bucket(64, 1, 16))
    assert left_out == LeftOut(0, 0)


def test_of_a_file_too_what_no_step_can_be_is_left_out_and_counted() -> None:
    plan, left_out = plan_of_file("f", FILE.splitlines(), StepSizes(128, 16384, 64, 1024))
    assert plan.prompts == (Bucket(1, 256, 2), Bucket(1, 512, 4))
    assert [b for b in plan.decodes if b.batch_size == 1] == [Bucket(1, 1, 3), Bucket(1, 1, 4), Bucket(1, 1, 128)]
    assert left_out == LeftOut(prompts=1, decodes=4)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("(1, 128)", "must be (batch size, tokens, blocks)"),
        ("1, 128, 0 0", "must be (batch size, tokens, blocks)"),
        ("(1, 128, 0", "must be (batch size, tokens, blocks)"),
        ("(1, '128', 0)", "'128' is not a number, list or range"),
        ("(1, True, 0)", "True is not a number, list or range"),
        ("(1, [], 0)", "[] is not a number, list or range"),
        ("(1, range(5), 0)", "range(5) is not a number, list or range"),
        ("(1, range(9, 5), 0)", "range(9, 5) is not a number, list or range"),
        ("(1, range(1, 9, 0), 0)", "range(1, 9, 0) is not a number, list or range"),
        ("(1, exit(), 0)", "exit() is not a number, list or range"),
        ("(0, 128, 0)", "must be at least 1"),
        ("(1, 128, -1)", "is not a number, list or range"),
        ("(1, 1, 0)", "a decode has at least 1 block"),
        ("(2, 128, 4)", "runs on its own: its batch size must be 1"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line: str, said: str) -> None:
    with pytest.raises(DeviceError) as error:
        plan_of_file("buckets.txt", ["# ours", "(1, 1, 4)", line], StepSizes(128, 4096, 8, 2048))
    assert str(error.value).startswith("buckets.txt, line 3: ")
    assert said in str(error.value)


@pytest.mark.parametrize(("line", "kind"), [("(1, 1, 4)", "prompts"), ("(1, 128, 0)", "decodes"), ("", "prompts")])
def test_a_file_without_a_kind_of_buckets_is_refused(line: str, kind: str) -> None:
    with pytest.raises(DeviceError, match=f"has no bucket for {kind}"):
        plan_of_file("f", [line], StepSizes(128, 4096, 8, 2048))
