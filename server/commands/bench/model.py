"""The model under test: found, checked against the workload, and loaded with just the cache that this needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tidewheel.engine.devices.base import Executor
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.load import OpenedModel, open_model
from tidewheel.engine.machine.memory import available_memory_bytes
from tidewheel.engine.models.spec import DecoderSpec, tensor_shapes
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.weights.dtypes import STORAGE, DType

from .device_runs import Profiler
from .workload import Room, Workload

_GIB = 2**30
_TORCH_COMPUTES_IN: DType = "float32"


@dataclass(frozen=True, slots=True)
class Plan:
    """A model and as much of the workload as fits it. `weight_format` is what the device multiplies."""

    opened: OpenedModel
    options: EngineOptions
    workload: Workload
    weight_format: str
    max_model_len: int
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`weight_bytes` are as the device packs them."""

    executor: Executor
    weight_bytes: int
    num_threads: int
    profiler: Profiler | None


def plan(options: EngineOptions, workload: Workload) -> Plan:
    """Find the model and see that the workload fits. Raises ModelError and DeviceError, saying what to change."""
    opened = open_model(options)
    on_torch = opened.device.name == "torch"
    weight_format = opened.quantization.method if opened.quantization else opened.dtype
    room = Room(
        longest_context=options.max_model_len or opened.spec.max_positions,
        kv_bytes_per_token=opened.kv_bytes_per_token,
        weight_bytes=_torch_bytes(opened.spec) if on_torch else opened.weight_bytes,
        kv_cache_limit_bytes=None if options.kv_cache_space is None else int(options.kv_cache_space * _GIB),
        available_bytes=available_memory_bytes(),
    )
    fitting = room.fit(workload)
    return Plan(
        opened=opened,
        options=options,
        workload=fitting,
        weight_format=_TORCH_COMPUTES_IN if on_torch else weight_format,
        max_model_len=room.longest_context,
        kv_cache_bytes=room.kv_bytes(fitting),
    )


def load(planned: Plan) -> LoadedModel:
    """Load it. A step may have as many sequences and decoded tokens as the workload needs, whatever the options say.

    Raises DeviceError if a profile is wanted of a device that has none.
    """
    opened, options, workload = planned.opened, planned.options, planned.workload
    executor = opened.load(
        options,
        kv_cache_bytes=planned.kv_cache_bytes,
        max_model_len=planned.max_model_len,
        max_num_seqs=max(options.max_num_seqs, workload.most_sequences),
        max_num_batched_tokens=max(options.max_num_batched_tokens, workload.most_sequences),
    )
    native = getattr(executor, "native", None)
    profiler = native if workload.profile and isinstance(native, Profiler) else None
    if workload.profile and profiler is None:
        executor.close()
        raise DeviceError(f"--profile is not supported by the {opened.device.name} device")
    if opened.device.name == "torch":
        import torch

        return LoadedModel(executor, _torch_bytes(opened.spec), torch.get_num_threads(), profiler)
    from tidewheel.engine.devices.cpu.executor import CpuExecutor

    assert isinstance(executor, CpuExecutor)
    return LoadedModel(executor, executor.native.weight_bytes, executor.native.num_threads, profiler)


def _torch_bytes(spec: DecoderSpec) -> int:
    parameters = sum(math.prod(shape) for shape in tensor_shapes(spec).values())
    return parameters * STORAGE[_TORCH_COMPUTES_IN].itemsize
