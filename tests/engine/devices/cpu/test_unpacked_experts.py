"""VLLM_CPU_MOE_PREPACK=0: experts stay in the checkpoint's files, and compute the same numbers."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import gguf_files
import models_zoo
import numpy as np
import pytest
from engine.weights.stored_tensors import StoredWeights, decoder
from harness import Harness, device_ids, load, make_device

pytest.importorskip("tidewheel._native")

from tidewheel.engine.devices.cpu.device import CpuDevice
from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.models.spec import DecoderSpec, ExpertsSpec
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.weights.dtypes import DType
from tidewheel.engine.weights.quantization import Quantization

CPU_IDS = [device for device in device_ids() if device != "torch"]
PREPACK = "VLLM_CPU_MOE_PREPACK"


def assert_same(path: Path, device: str, monkeypatch: pytest.MonkeyPatch, dtype: DType = "float32") -> None:
    """Packed or not, in one piece or in chunks, on one thread or all: the numbers are the same, the memory is not."""
    random = np.random.default_rng(3)
    prompts = [random.integers(3, 90, length).tolist() for length in (37, 1, 5)]
    made, num_bytes = [], []
    for value, threads, chunk in (("1", "auto", 2048), ("0", "auto", 2048), ("0", "0", 7)):
        monkeypatch.setenv(PREPACK, value)
        executor = load(make_device(device, threads), path, dtype)
        made.append(Harness(executor).generate(prompts, 3, chunk))
        num_bytes.append(executor.native.weight_bytes)  # type: ignore[attr-defined]
        executor.close()
    for packed, *others in zip(*made, strict=True):
        for other in others:
            np.testing.assert_array_equal(np.stack(packed.logits), np.stack(other.logits), strict=True)
    assert num_bytes[1] == num_bytes[2] < num_bytes[0]


@pytest.mark.parametrize("device", CPU_IDS)
def test_every_level_computes_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(models_zoo.folder("gpt-oss", "bfloat16"), device, monkeypatch)


@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")]
)
def test_floats_of_safetensors_compute_the_same(stored: str, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(models_zoo.folder("mixtral", stored), CPU_IDS[0], monkeypatch, dtype)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0"])
def test_gguf_types_compute_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    quantize = gguf_files.quantized(gguf.GGMLQuantizationType[kind])
    assert_same(gguf_files.zoo_file(tmp_path / "model.gguf", "olmoe", quantize), CPU_IDS[0], monkeypatch)


def test_memory_is_counted_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(str(models_zoo.folder("mixtral", "bfloat16", tokenizer=True)), device="cpu")
    packed = open_model(options).weight_bytes
    for off in ("0", "False"):
        monkeypatch.setenv(PREPACK, off)
        assert open_model(options).weight_bytes < packed
    monkeypatch.setenv(PREPACK, "true")
    assert open_model(options).weight_bytes == packed


def test_another_value_is_an_error_for_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREPACK, "2")
    with pytest.raises(DeviceError, match=r"\$VLLM_CPU_MOE_PREPACK: must be 1 or 0, got '2'; 1 packs experts"):
        open_model(EngineOptions(str(models_zoo.folder("llama", tokenizer=True)), device="cpu"))


def mixture() -> DecoderSpec:
    attention, mlp = decoder().layers[0]
    return replace(decoder(tied=False), layers=((attention, replace(mlp, mixer=ExpertsSpec(4, 2, 256))),))


@pytest.mark.parametrize(
    ("kind", "quantization", "reason"),
    [
        ("awq", None, "has integers that are reordered during reading"),
        ("q8_0", Quantization("int8"), "is quantized by --quantization"),
        ("q8_0", None, None),
    ],
)
def test_what_is_not_possible_is_said(
    kind: str,
    quantization: Quantization | None,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(PREPACK, "0")
    options = ExecutorOptions("float32", 1 << 20, 64, 2, 64, quantization=quantization)
    spec = mixture()
    with caplog.at_level(logging.INFO):
        CpuDevice(CpuOptions(cache_dir=str(tmp_path))).load(spec, StoredWeights(spec, kind), options).close()
    said = "VLLM_CPU_MOE_PREPACK=0 has no effect, and experts are packed while they are loaded: layers.0.experts.0"
    assert (said in caplog.text) == (reason is not None)
    assert reason is None or reason in caplog.text
    assert ("12 matrices of experts stay in the checkpoint's files" in caplog.text) == (reason is None)
    assert ("12 matrices of experts are kept in memory as they were read" in caplog.text) == (reason is None)
    assert ("--cache-dir has no effect with VLLM_CPU_MOE_PREPACK=0" in caplog.text) == (reason is None)
