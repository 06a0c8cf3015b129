"""The device's options, refusals and messages."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.devices.made_models import PLAIN, SLOPES, VOCAB_SIZE, RandomWeights, decoder, reference
from harness import Harness

from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.devices.memory_options import MemoryOptions
from tidewheel.engine.devices.tpu.device import TpuDevice
from tidewheel.engine.devices.tpu.heads import Kernel
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.install_hint import install_command
from tidewheel.engine.models.spec import AttentionSpec

pytest.importorskip("jax")

SPEC = decoder(PLAIN)
TESTS = Path(__file__).parents[3]


def run_python(code: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=TESTS,
        env={**inherited, **environment},
    )
    return done.stdout


LOAD = """
import sys

from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.devices.memory_options import MemoryOptions
from tidewheel.engine.devices.tpu.device import TpuDevice
from tidewheel.engine.errors import DeviceError
from engine.devices.made_models import PLAIN, RandomWeights, decoder
spec = decoder(PLAIN)
device = TpuDevice()
print("jax" in sys.modules, device.capabilities.own_memory)
try:
    device.load(spec, RandomWeights(spec), ExecutorOptions("bfloat16", 1 << 20, 64, 1, 64))
except DeviceError as error:
    print(error)
"""


def test_without_jax_the_error_says_what_to_install() -> None:
    output = run_python("import sys; sys.modules['jax'] = None\n" + LOAD)
    assert install_command("tpu") in output


# Its process imports JAX.
def test_without_a_tpu_the_processor_is_not_taken_in_silence() -> None:
    first, error = run_python(LOAD).splitlines()
    assert first == "False True"  # nothing imports jax before a model is loaded
    assert "JAX finds no TPU here (its platform is cpu)" in error
    assert "JAX_PLATFORMS=cpu" in error


@pytest.mark.sweep
def test_jax_without_a_tpu_that_it_was_asked_for_is_reported() -> None:
    assert "JAX cannot start on a TPU" in run_python(LOAD, JAX_PLATFORMS="tpu")


def test_jax_that_cannot_start_on_a_tpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    def fail() -> str:
        raise RuntimeError("no TPU answers")

    monkeypatch.setattr(jax, "default_backend", fail)
    with pytest.raises(DeviceError, match="JAX cannot start on a TPU: no TPU answers"):
        TpuDevice().load(SPEC, RandomWeights(SPEC), ExecutorOptions("bfloat16", 1 << 20, 64, 1, 64))


def test_weights_are_bfloat16_by_default() -> None:
    assert TpuDevice().default_dtype("float16") == "bfloat16"
    assert TpuDevice().default_dtype("float32") == "bfloat16"


def test_types_that_it_has_not_are_refused_with_a_way_out() -> None:
    from engine.devices.tpu.making import load

    with pytest.raises(DeviceError, match="choose --dtype bfloat16"):
        load(SPEC, dtype="float16", kv_cache_dtype="bfloat16")
    with pytest.raises(DeviceError, match="not fp8_e5m2: choose one of them with --kv-cache-dtype"):
        TpuDevice().kv_bytes_per_token(SPEC, "fp8_e5m2")


def test_bfloat16_differs_by_rounding() -> None:
    from engine.devices.tpu.making import load

    exact = reference(SPEC)
    tokens = np.random.default_rng(4).integers(0, VOCAB_SIZE, len(exact)).tolist()
    rounded = Harness(load(SPEC, dtype="bfloat16")).logits(tokens, chunk=16)
    assert 0 < np.sqrt(np.mean((rounded - exact) ** 2)) <= 2 * 2.0**-8 * np.abs(exact).max()


def test_the_cache_of_a_tpu_has_heads_of_whole_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    values = 2 * 2 * 40  # K and V of 2 KV heads of 40
    assert TpuDevice().kv_bytes_per_token(SPEC, "float32") == values * 4
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert TpuDevice().kv_bytes_per_token(SPEC, "bfloat16") == values // 40 * 128 * 2
    assert TpuDevice().kv_bytes_per_token(decoder(replace(PLAIN, sinks=True)), "bfloat16") == values * 2


@pytest.mark.parametrize(
    ("attention", "itemsize", "reason"),
    [
        (PLAIN, 2, None),
        (replace(PLAIN, sliding_window=9, softcap=3.0), 4, None),
        (replace(PLAIN, alibi_slopes=SLOPES), 2, "ALiBi"),
        (replace(PLAIN, sinks=True), 2, "attention sinks"),
        (replace(PLAIN, num_kv_heads=3), 2, None),
        (replace(PLAIN, head_dim=160), 2, None),
        (replace(PLAIN, head_dim=160), 4, "heads of more than 128 values in float32"),
    ],
)
def test_the_kernel_is_taken_where_it_computes_the_layer(attention: Any, itemsize: int, reason: str | None) -> None:
    kernel = Kernel(available=True, num_devices=1, itemsize=itemsize)
    assert kernel.refusal(attention) == reason
    assert kernel.computes(attention) == (reason is None)
    assert not replace(kernel, available=False).computes(attention)


@pytest.mark.parametrize(
    ("attention", "itemsize", "num_devices", "shape", "reason"),
    [
        (PLAIN, 2, 1, (16, 4, 128), None),
        (replace(PLAIN, num_kv_heads=3), 2, 1, (3, 16, 2, 128), "3 KV heads on a chip, which fill no tiles"),
        (replace(PLAIN, num_kv_heads=3), 2, 3, (16, 6, 128), None),
        (replace(PLAIN, head_dim=160), 2, 1, (2, 16, 2, 256), "heads of more than 128 values"),
        (replace(PLAIN, head_dim=160, num_kv_heads=1), 2, 1, (16, 2, 256), None),
        (replace(PLAIN, num_heads=8, num_kv_heads=8), 4, 1, (8, 16, 2, 128), "full attention in float32"),
        (replace(PLAIN, num_heads=8, num_kv_heads=8), 2, 1, (16, 16, 128), None),
        (replace(PLAIN, num_heads=16, num_kv_heads=8), 4, 1, (16, 16, 128), None),
    ],
)
def test_heads_have_pages_of_their_own_where_the_kernel_computes_one_after_the_other(
    attention: AttentionSpec, itemsize: int, num_devices: int, shape: tuple[int, ...], reason: str | None
) -> None:
    kernel = Kernel(True, num_devices, itemsize)
    assert kernel.page_shape(attention, 16) == shape
    assert kernel.separation(attention) == reason
    plain = 16, 2 * attention.num_kv_heads, attention.head_dim
    assert replace(kernel, available=False).page_shape(attention, 16) == plain
    assert kernel.page_shape(replace(attention, sinks=True), 16) == plain


class Chip:
    """A chip with 100 MiB; weights have 40 of them."""

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 100 << 20, "bytes_in_use": 40 << 20}


@pytest.mark.parametrize(("memory", "least", "most"), [(None, 45, 54), (0.5, 25, 30)])
def test_a_cache_that_nobody_sized_gets_its_part_of_what_weights_and_a_step_leave(
    memory: float | None, least: int, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from engine.devices.tpu.making import OPTIONS, device

    from tidewheel.engine.devices.tpu import loading

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(loading, "first_chip", lambda mesh: Chip())
    made = device(memory=None if memory is None else MemoryOptions(gpu_memory_utilization=memory))
    executor = made.load(SPEC, RandomWeights(SPEC), OPTIONS)
    taken = executor.limits.num_blocks * executor.limits.block_size * made.kv_bytes_per_token(SPEC, "float32")
    assert least << 20 < taken <= most << 20
    assert "A chip has 0.10 GiB of memory: weights take 0.04 GiB" in caplog.text
    assert f"of the rest (gpu_memory_utilization={memory or 0.9})" in caplog.text
    executor.close()


def test_sampling_takes_its_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.devices.tpu.making import OPTIONS, device

    from tidewheel.engine.devices.tpu import loading

    monkeypatch.setattr(loading, "first_chip", lambda mesh: Chip())
    spec, made = replace(SPEC, vocab_size=1 << 16), device()
    executor = made.load(spec, RandomWeights(spec), OPTIONS)
    cache_bytes = executor.limits.num_blocks * executor.limits.block_size * made.kv_bytes_per_token(spec, "float32")
    logits_bytes = 4 * OPTIONS.max_num_seqs * spec.vocab_size
    # The logits of two steps, and at least what sorting those of one takes.
    assert 0 < cache_bytes <= 0.9 * ((60 << 20) - 4 * logits_bytes)
    executor.close()


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("num_tokens", [16, None], ids=["a given size", "an unknown size"])
def test_a_number_of_blocks_goes_before_all_else(num_tokens: int | None, num_devices: int) -> None:
    from engine.devices.tpu.making import OPTIONS, device

    made = device(num_devices)
    size = None if num_tokens is None else num_tokens * made.kv_bytes_per_token(SPEC, "float32")
    executor = made.load(SPEC, RandomWeights(SPEC), replace(OPTIONS, kv_cache_bytes=size, num_blocks=37))
    assert executor.limits.num_blocks == 37
    executor.close()


def test_a_cache_that_does_not_fit_is_said() -> None:
    from engine.devices.tpu.making import load

    with pytest.raises(DeviceError, match=f"no memory for a KV cache of {1 << 40} blocks: lower --num-gpu-blocks"):
        load(SPEC, num_blocks=1 << 40)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "the device has no memory of its own"),
        ({"num_blocks": 9}, "--num-gpu-blocks-override is the size of the KV cache"),
    ],
)
def test_a_part_of_the_memory_that_is_given_for_nothing_is_named(
    given: dict[str, int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    from engine.devices.tpu.making import load

    load(SPEC, memory=MemoryOptions(gpu_memory_utilization=0.5), **given).close()
    assert f"--gpu-memory-utilization has no effect: {reason}" in caplog.messages


def test_fewer_sequences_run_where_tables_of_all_would_be_too_large(caplog: pytest.LogCaptureFixture) -> None:
    from engine.devices.tpu.making import load

    executor = load(SPEC, max_model_len=1 << 20, max_num_seqs=64)
    assert executor.limits.max_num_seqs == 32  # with 4096 pages of 256 tokens each
    assert "--max-num-seqs is lowered from 64 to 32" in caplog.text
    executor.close()
