"""KV blocks out of the cache and back: another executor with any groups goes on from them, to the bit."""

from __future__ import annotations

from typing import Any

import models_zoo
import numpy as np
import pytest
from harness import Harness, device_ids, load, make_device
from optional_packages import require_packages

from tidewheel.engine.errors import DeviceError
from tidewheel.engine.weights.dtypes import KvCacheDType

require_packages("transformers")
native: Any = pytest.importorskip("tidewheel._native")

PROMPT = [(7 * i) % 300 + 4 for i in range(50)]
FULL = 48  # tokens of its full blocks
LEVELS = [device for device in device_ids() if device != "torch"]


def cpu(level: str, threads_bind: str, kv_cache_dtype: KvCacheDType = "bfloat16", model: str = "llama") -> Any:
    executor = load(make_device(level, threads_bind), models_zoo.folder(model), kv_cache_dtype=kv_cache_dtype)
    return executor


TYPES: list[KvCacheDType] = ["bfloat16", "float32", "int8", "fp8_e5m2", "fp8_e4m3"]


@pytest.mark.parametrize(
    ("model", "kv_cache_dtype"),
    [("llama", "int4"), *((model, dtype) for model in ("llama", "minicpm3") for dtype in TYPES)],
)
def test_another_executor_goes_on_from_the_bytes_of_blocks(model: str, kv_cache_dtype: KvCacheDType) -> None:
    cpus = [processor["cpu"] for processor in native.topology()["processors"]]
    if len(cpus) < 2:
        pytest.skip("two groups need two processors")
    first = cpu(LEVELS[0], f"{cpus[0]}", kv_cache_dtype, model)
    second = cpu(LEVELS[0], f"{cpus[0]}|{cpus[1]}", kv_cache_dtype, model)
    harness, other = Harness(first), Harness(second, seed=1)
    sequence = harness.start(PROMPT, 8)
    harness.step([sequence])
    full = sequence.blocks[: FULL // first.limits.block_size]
    data = first.read_blocks(np.array(full, np.int32))
    assert data.shape == (len(full), first.block_bytes)
    assert data.any(axis=1).all()

    again = other.start(PROMPT, 8)
    own = np.array(again.blocks[: len(full)], np.int32)
    second.write_blocks(own, data)
    assert (second.read_blocks(own) == data).all()
    again.cached = FULL
    for _ in range(8):
        other.step([again])
    for _ in range(7):
        harness.step([sequence])
    assert again.tokens == sequence.tokens
    assert all((a == b).all() for a, b in zip(again.logits, sequence.logits, strict=True))


def test_latents_are_not_cached_in_int4_and_the_error_says_what_to_take() -> None:
    with pytest.raises(DeviceError, match="latents of minicpm3 in int4: take --kv-cache-dtype int8 or fp8_e4m3"):
        cpu(LEVELS[0], "auto", "int4", "minicpm3")


def test_blocks_that_are_not_there_and_too_few_bytes_are_refused() -> None:
    executor = cpu(LEVELS[0], "auto")
    beyond = executor.limits.num_blocks + 1  # behind the padding block
    with pytest.raises(ValueError, match=f"block {beyond} is outside the cache"):
        executor.read_blocks(np.array([beyond], np.int32))
    with pytest.raises(ValueError, match="number of bytes must match the blocks"):
        executor.write_blocks(np.array([0, 1], np.int32), np.zeros((1, executor.block_bytes), np.uint8))
    executor.close()


def test_the_version_says_which_kernels_have_computed_the_blocks() -> None:
    versions = {make_device(level).kv_version() for level in LEVELS}  # type: ignore[attr-defined]
    assert len(versions) == len(LEVELS)
