"""A model that several processes share gives the tokens of one."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from engine.devices.graph.served import FEW_BUCKETS, load, serve, storm
from engine.devices.made_models import MLP, NORM, ROPE, decoder_of

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.batch import SamplingBatch, StepBatch
from tidewheel.engine.devices.executor import Executor, Pending
from tidewheel.engine.devices.parallel_options import ParallelOptions
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    MixerSpec,
    ParallelSpec,
    ResidualBlockSpec,
)

EAGER = dataclasses.replace(FEW_BUCKETS, enforce_eager=True, skip_warmup=True)
HEADS = AttentionSpec(num_heads=8, num_kv_heads=4, head_dim=16, scale=0.25, qkv_bias=True, out_bias=True)
SLOPES = tuple(2.0 ** -(head + 1) for head in range(8))
BIASED_MLP = dataclasses.replace(MLP, bias=True)
SPECS = {
    "one-after-the-other": decoder_of(
        (ResidualBlockSpec(HEADS, NORM, post_norm=NORM), ResidualBlockSpec(BIASED_MLP, NORM, sum_norm=NORM)),
        (
            ResidualBlockSpec(dataclasses.replace(HEADS, sliding_window=24, qk_norm=NORM), NORM),
            ResidualBlockSpec(MLP, NORM),
        ),
    ),
    "few-kv-heads": decoder_of(
        (ResidualBlockSpec(dataclasses.replace(HEADS, num_kv_heads=1, sinks=True), NORM), ResidualBlockSpec(MLP, NORM)),
    ),
    "latents-and-experts": decoder_of(
        (
            ResidualBlockSpec(LatentAttentionSpec(4, 24, 40, 20, 56, 0.125, ROPE, NORM, q_rank=32, bias=True), NORM),
            ResidualBlockSpec(ExpertsSpec(5, 2, 40, bias=True, shared=MLP, shared_gate=True), NORM),
        ),
    ),
    "side-by-side": decoder_of(
        (
            ResidualBlockSpec(
                ParallelSpec(
                    (
                        ResidualBlockSpec(dataclasses.replace(HEADS, alibi_slopes=SLOPES), NORM),
                        ResidualBlockSpec(BIASED_MLP, NORM, scale=0.5),
                    )
                )
            ),
        ),
        (
            ResidualBlockSpec(
                ParallelSpec((ResidualBlockSpec(HEADS, NORM, post_norm=NORM), ResidualBlockSpec(MLP, NORM)))
            ),
        ),
    ),
}


BATCH = StepBatch(
    token_ids=np.array([1, 2], np.int32),
    positions=np.array([0, 1], np.int32),
    query_start=np.array([0, 2], np.int32),
    context_len=np.array([2], np.int32),
    block_tables=np.zeros((1, 1), np.int32),
    logits_rows=np.array([1], np.int32),
    sampling=SamplingBatch.greedy([2]),
)


def share(spec: DecoderSpec, size: int) -> Executor:
    return load(get_device("graph-cpu", [EAGER, ParallelOptions(size)]), spec=spec)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("one-after-the-other", 2),
        ("few-kv-heads", 4),
        ("few-kv-heads", 2),
        ("side-by-side", 2),
        ("latents-and-experts", 4),
    ],
)
def test_processes_that_share_a_model_give_the_reference_tokens(name: str, size: int) -> None:
    jobs = storm()[:3]
    expected = serve(load(get_device("torch"), spec=SPECS[name]), jobs)
    executor = share(SPECS[name], size)
    assert len(executor.followers) == size - 1
    assert serve(executor, jobs) == expected
    followers = executor.followers
    executor.close()
    executor.close()
    assert not any(map(_runs, followers))


# The second process imports torch, which takes more than a second.
def test_two_processes_give_the_reference_tokens_until_one_dies_which_ends_the_step() -> None:
    spec = decoder_of(
        *SPECS["few-kv-heads"].layers, SPECS["side-by-side"].layers[0], SPECS["latents-and-experts"].layers[0]
    )
    jobs = storm()[:3]
    expected = serve(load(get_device("torch"), spec=spec), jobs)
    executor = share(spec, 2)
    try:
        (follower,) = executor.followers
        assert serve(executor, jobs) == expected
        pending = executor.start(BATCH)
        os.kill(follower, signal.SIGKILL)
        with pytest.raises((DeviceError, RuntimeError)):
            _go_on(executor, pending)
    finally:
        executor.close()
    assert not _runs(follower)


def test_a_process_that_cannot_begin_ends_the_start_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DeviceError, match="the process of accelerator 1 has ended with code 1"):
        share(SPECS["few-kv-heads"], 2)


@pytest.mark.sweep
def test_a_process_that_cannot_load_ends_the_start_with_an_error() -> None:
    with pytest.raises((DeviceError, RuntimeError, MemoryError)):
        load(get_device("graph-cpu", [EAGER, ParallelOptions(2)]), num_blocks=1 << 40)


@pytest.mark.parametrize(
    ("mixer", "size", "reason"),
    [
        (HEADS, 3, "8 query heads with 4 KV heads cannot be shared by 3 accelerators"),
        (dataclasses.replace(HEADS, qk_norm=NORM, qk_norm_over="whole"), 2, "normalized over all heads together"),
        (LatentAttentionSpec(4, 24, 40, 20, 56, 0.125, ROPE, NORM), 3, "4 heads of attention to latents cannot be"),
        (ExpertsSpec(5, 2, 40), 3, "an expert of 40 values cannot be shared by 3"),
        (dataclasses.replace(MLP, cutoff=1.0), 2, "compared with the mean of all its values"),
    ],
)
def test_what_cannot_be_shared_is_refused(mixer: MixerSpec, size: int, reason: str) -> None:
    with pytest.raises(DeviceError, match=reason):
        share(decoder_of((ResidualBlockSpec(mixer, NORM), ResidualBlockSpec(MLP, NORM))), size)


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _go_on(executor: Executor, pending: Pending) -> None:
    """Started work may still be done, and nothing after it."""
    pending.wait()
    executor.start(BATCH).wait()
