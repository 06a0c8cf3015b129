"""Weights stay in the bits of a quantized file: their numbers are the file's, and so is the memory that they take."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from cores import one_core
from numpy.typing import NDArray

pytest.importorskip("tidewheel._native")

from engine.weights.stored_tensors import KINDS, StoredWeights, decoder
from harness import Harness, device_ids

from tidewheel.engine.devices.cpu.device import CpuDevice
from tidewheel.engine.devices.cpu.executor import CpuExecutor
from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.models.spec import DecoderSpec, ExpertsSpec, MlpSpec
from tidewheel.engine.weights.quantization import Quantization

Logits: TypeAlias = NDArray[np.float32]

LEVELS = [device.removeprefix("cpu-") for device in device_ids() if device != "torch"]
TOKENS = [*range(3, 43)]
ROUNDING, DIVERGENCE = 0.04, 1e-3


def load(
    spec: DecoderSpec,
    weights: Any,
    level: str = "auto",
    quantization: Quantization | None = None,
    cache_dir: Path | None = None,
    threads_bind: str | None = None,
) -> CpuExecutor:
    options = ExecutorOptions(
        dtype="float32",
        kv_cache_bytes=1 << 22,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        quantization=quantization,
    )
    folder = None if cache_dir is None else str(cache_dir)
    return CpuDevice(CpuOptions(threads_bind or one_core(), cache_dir=folder), isa=level).load(spec, weights, options)


def logits(executor: CpuExecutor) -> Logits:
    result = Harness(executor).logits(TOKENS)
    executor.close()
    return result


def assert_close(computed: Logits, expected: Logits, times: float = 1) -> None:
    """Check logits, and the tokens' odds, up to rounding: activations are rounded to 1/127 of the largest of 32."""
    assert np.square(computed - expected).mean() <= (times * ROUNDING) ** 2 * np.square(expected).mean()
    p, q = (scores - np.logaddexp.reduce(scores, -1, keepdims=True) for scores in (expected, computed))
    assert (np.exp(p) * (p - q)).sum(-1).mean() <= times * DIVERGENCE


@functools.cache
def dequantized(*kinds: str, tied: bool = True, num_layers: int = 2) -> Logits:
    spec = decoder(tied, num_layers)
    return logits(load(spec, StoredWeights(spec, *kinds, dequantized=True)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_the_files_and_so_is_the_memory(kind: str) -> None:
    spec = decoder()
    weights = StoredWeights(spec, kind)
    executor = load(spec, weights)
    assert executor.native.weight_bytes <= 1.08 * weights.file_bytes()
    assert_close(logits(executor), dequantized(kind))


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_computes_with_a_mixture(level: str) -> None:
    spec = decoder(tied=False, num_layers=4)
    weights = StoredWeights(spec, *KINDS)
    assert {*weights.kinds.values()} == {*KINDS}
    expected = dequantized(*KINDS, tied=False, num_layers=4)
    assert_close(logits(load(spec, weights, level)), expected, times=2)  # for twice the layers


@pytest.mark.parametrize("kinds", [("q4_k",), tuple(KINDS)], ids=["alike", "mixed"])
def test_experts_keep_their_bits_where_gate_and_up_agree(
    kinds: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    attention, mlp = decoder().layers[0]
    # All experts compute every token: rounded activations choose others where two are nearly as good.
    experts = replace(mlp, mixer=ExpertsSpec(4, 4, 256, shared=MlpSpec(256, "silu", gated=True)))
    spec = replace(decoder(tied=False), layers=((attention, experts),) * 2)
    with caplog.at_level(logging.INFO):
        computed = logits(load(spec, StoredWeights(spec, *kinds)))
    expected = logits(load(spec, StoredWeights(spec, *kinds, dequantized=True)))
    assert_close(computed, expected, times=2)  # a token near a tie may be given to other experts
    assert "2 quantized matrices are dequantized as they are read: routers are kept in float32" in caplog.text
    assert ("gate and up of an expert are stored in different ways" in caplog.text) == (kinds != ("q4_k",))


def test_quantization_still_converts_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    spec = decoder()
    with caplog.at_level(logging.INFO):
        executor = load(spec, StoredWeights(spec, "q6_k", "gptq-4"), quantization=Quantization("int8"))
    assert (
        "15 quantized matrices are dequantized as they are read: --quantization or --embedding-dtype converts"
        in caplog.text
    )
    floats = load(spec, StoredWeights(spec, "q6_k", "gptq-4", dequantized=True), quantization=Quantization("int8"))
    np.testing.assert_array_equal(logits(executor), logits(floats))


def test_packed_weights_are_kept_for_the_next_start(tmp_path: Path) -> None:
    spec = decoder()

    class Unread(StoredWeights):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("the file is read again")

    first = load(spec, StoredWeights(spec, *KINDS), cache_dir=tmp_path)
    for thread in threading.enumerate():
        if thread.name == "packed-cache":  # which writes
            thread.join()
    expected = logits(first)
    np.testing.assert_array_equal(logits(load(spec, Unread(spec, *KINDS), cache_dir=tmp_path)), expected)
