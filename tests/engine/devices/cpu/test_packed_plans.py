"""Packed weights on disk are taken only for the plan that they were packed for."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine.devices.made_models import NORM, PLAIN, RandomWeights, decoder
from harness import Harness
from numpy.typing import NDArray

from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.models.spec import DecoderSpec
from tidewheel.engine.weights.quantization import Quantization

pytest.importorskip("tidewheel._native")
from tidewheel.engine.devices.cpu.device import CpuDevice

INT8 = Quantization("int8")


def logits(spec: DecoderSpec, cache: Path, quantization: Quantization | None, entries: int) -> NDArray[np.float32]:
    """The logits of a load for which the folder had, or then has, `entries` entries."""
    weights = RandomWeights(spec)
    weights.identity = "one checkpoint"
    options = ExecutorOptions("float32", 2**22, 64, 16, 64, quantization=quantization)
    executor = CpuDevice(CpuOptions(cache_dir=str(cache))).load(spec, weights, options)
    result = Harness(executor).logits([3, 1, 4, 1, 5, 9, 2, 6])
    deadline = time.monotonic() + 20
    while len(list(cache.glob("*.packed"))) != entries:
        assert time.monotonic() < deadline, "no entry was written"
        time.sleep(0.002)
    executor.close()
    return result


def test_a_norm_that_adds_one_to_its_weight_is_packed_anew(tmp_path: Path) -> None:
    plain = decoder(PLAIN)
    above_one = replace(plain, final_norm=replace(NORM, unit_offset=True))
    first = logits(plain, tmp_path / "one", INT8, 1)
    second = logits(above_one, tmp_path / "one", INT8, 2)
    assert np.abs(first - second).max() > 1e-2 * np.abs(first).max()
    np.testing.assert_array_equal(logits(above_one, tmp_path / "other", INT8, 1), second)
    for spec, expected in ((plain, first), (above_one, second)):
        np.testing.assert_array_equal(logits(spec, tmp_path / "one", INT8, 2), expected)
