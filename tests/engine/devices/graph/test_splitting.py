"""A batch becomes launches that have all of its sequences, each in a bucket that holds it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.devices.batch import SamplingBatch, StepBatch
from tidewheel.engine.devices.bucketing import BucketPlan, StepSizes
from tidewheel.engine.devices.graph.buckets import plan_buckets
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.devices.graph.splitting import Launch, Splitter

BLOCK = 16
PLAN = plan_buckets(GraphOptions(prompt_bs_bucket_max=4, prompt_seq_bucket_max=128), StepSizes(BLOCK, 256, 16, 256))


def split(sequences: list[tuple[int, int]], plan: BucketPlan = PLAN) -> list[Launch]:
    """Sequences are tokens that are cached, and tokens to run."""
    lengths = np.array([length for _, length in sequences], np.int32)
    ends = np.array([cached + length for cached, length in sequences], np.int32)
    batch = StepBatch(
        token_ids=np.zeros(lengths.sum(), np.int32),
        positions=np.concatenate([np.arange(cached, cached + length) for cached, length in sequences]),
        query_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        context_len=ends,
        block_tables=np.zeros((len(sequences), 16), np.int32),
        logits_rows=np.zeros(0, np.int32),
        sampling=SamplingBatch.greedy([]),
    )
    return list(Splitter(plan, BLOCK).split(batch))


sizes = st.tuples(st.sampled_from([0, 0, 15, 16, 100]), st.one_of(st.just(1), st.integers(1, 156)))


@settings(deadline=None)
@given(st.lists(sizes, min_size=1, max_size=30))
def test_every_sequence_is_in_one_launch_that_holds_it(sequences: list[tuple[int, int]]) -> None:
    launches = split(sequences)
    assert sorted(s for launch in launches for s in launch.sequences.tolist()) == list(range(len(sequences)))
    for launch in launches:
        bucket = launch.bucket
        longest = max(sequences[s][1] for s in launch.sequences)
        widest = max(-(-sum(sequences[s]) // BLOCK) for s in launch.sequences)
        assert bucket.holds(len(launch.sequences), longest, widest)
        assert (launch.phase == "decode") == (longest == 1)
        buckets = PLAN.decodes if launch.phase == "decode" else PLAN.prompts + PLAN.contexts
        assert launch.is_planned == (bucket in buckets)
        if longest > 1 and any(sequences[s][0] for s in launch.sequences):
            assert len(launch.sequences) == 1, "a chunk with context runs alone"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 255), st.just(1)), min_size=1, max_size=40))
def test_decodes_always_have_a_bucket(sequences: list[tuple[int, int]]) -> None:
    assert all(launch.is_planned for launch in split(sequences))


def test_decodes_run_together_and_so_do_prompts_of_like_length() -> None:
    launches = split([(5, 1), (0, 20), (100, 1), (0, 30), (0, 100), (40, 1), (0, 17)])
    assert [(launch.phase, launch.sequences.tolist()) for launch in launches] == [
        ("decode", [0, 2, 5]),
        ("prompt", [1, 3, 6]),
        ("prompt", [4]),
    ]


@pytest.mark.parametrize(("cached", "length"), [(0, 140), (100, 150), (250, 1)])
def test_what_no_bucket_holds_is_hardly_padded(cached: int, length: int) -> None:
    narrow = plan_buckets(
        GraphOptions(prompt_seq_bucket_max=128, decode_seq_bucket_max=128), StepSizes(BLOCK, 256, 16, 256)
    )
    (launch,) = split([(cached, length)], narrow)
    assert not launch.is_planned
    assert launch.bucket == (1, length, 16)


def test_those_that_fit_do_not_suffer_from_one_that_does_not() -> None:
    narrow = plan_buckets(GraphOptions(decode_seq_bucket_max=128), StepSizes(BLOCK, 256, 16, 256))
    launches = split([(5, 1), (200, 1), (6, 1)], narrow)
    assert [(launch.sequences.tolist(), launch.is_planned) for launch in launches] == [([0, 2], True), ([1], False)]
