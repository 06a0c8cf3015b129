"""Executors of the TPU device, with few sizes to compile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from engine.devices.made_models import RandomWeights

from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.devices.memory_options import MemoryOptions
from tidewheel.engine.devices.parallel_options import ParallelOptions
from tidewheel.engine.devices.tpu.device import TpuDevice
from tidewheel.engine.devices.tpu.executor import TpuExecutor
from tidewheel.engine.devices.tpu.options import TpuOptions
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import DecoderSpec
from tidewheel.engine.weights import open_weights, read_config
from tidewheel.engine.weights.tensor import WeightSource

OPTIONS = ExecutorOptions("float32", None, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=16)
NO_CACHE = TpuOptions(xla_cache_path=None)


def device(num_devices: int = 1, options: TpuOptions = NO_CACHE, memory: MemoryOptions | None = None) -> TpuDevice:
    return TpuDevice(options, memory, ParallelOptions(tensor_parallel_size=num_devices))


def load(
    spec: DecoderSpec,
    weights: WeightSource | None = None,
    num_devices: int = 1,
    num_tokens: int = 2048,
    tpu: TpuOptions = NO_CACHE,
    memory: MemoryOptions | None = None,
    **options: Any,
) -> TpuExecutor:
    """The model with room in the cache for `num_tokens`, by default with random weights."""
    asked = replace(OPTIONS, **options)
    made = device(num_devices, tpu, memory)
    size = num_tokens * made.kv_bytes_per_token(spec, asked.cache_dtype)
    executor = made.load(spec, weights or RandomWeights(spec), replace(asked, kv_cache_bytes=size))
    assert isinstance(executor, TpuExecutor)
    return executor


def load_folder(folder: Path, num_devices: int = 1, **options: Any) -> TpuExecutor:
    """The model in a folder."""
    description = describe(read_config(folder))
    return load(description.spec, open_weights(folder, description), num_devices, **options)


class Compilations:
    """Counts what JAX compiles, or finds compiled, while it is entered."""

    def __init__(self) -> None:
        self.count = 0

    def _hear(self, event: str, seconds: float, **_: object) -> None:
        self.count += event.endswith("/backend_compile_duration")

    def __enter__(self) -> Compilations:
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)
