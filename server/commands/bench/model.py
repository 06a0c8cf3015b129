"""The model under test: found, checked against the workload, and loaded with just the cache that this needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tidewheel.engine.devices.cpu.ceilings import compute_ceiling
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.loading.opened_model import OpenedModel, open_model
from tidewheel.engine.machine.memory import available_memory_bytes
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.weights.dtypes import STORAGE, DType
from tidewheel.engine.weights.quantization import TensorFormat

from .device_runs import Profiler
from .workload import Room, Workload

_GIB = 2**30
_TORCH_COMPUTES_IN: DType = "float32"


@dataclass(frozen=True, slots=True)
class Plan:
    """A model and as much of the workload as fits it. `compute_ceiling` belongs to the type of its products."""

    opened: OpenedModel
    options: EngineOptions
    workload: Workload
    compute_ceiling: str
    max_model_len: int
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`weight_bytes` are as the device packs them. `num_threads` is None for a device with processors of its own."""

    executor: Executor
    weight_bytes: int
    num_threads: int | None
    profiler: Profiler | None


def plan(options: EngineOptions, workload: Workload) -> Plan:
    """Find the model and see that the workload fits. Raises ModelError and DeviceError, saying what to change."""
    if options.pipeline.stages > 1:
        raise DeviceError(
            "tidewheel bench measures one process: leave --pipeline-parallel-size out, or measure a server with "
            "load_tests/"
        )
    opened = open_model(options)
    own_memory = opened.device.capabilities.own_memory
    room = Room(
        longest_context=options.max_model_len or opened.spec.max_positions,
        kv_bytes_per_token=opened.kv_bytes_per_token,
        state_bytes=opened.slot_bytes,
        weight_bytes=sum(tensor_bytes(opened).values()),
        kv_cache_limit_bytes=None if options.kv_cache_space is None else int(options.kv_cache_space * _GIB),
        available_bytes=None if own_memory else available_memory_bytes(),
    )
    fitting = room.fit(workload)
    return Plan(
        opened=opened,
        options=options,
        workload=fitting,
        compute_ceiling=_compute_ceiling(opened),
        max_model_len=room.longest_context,
        kv_cache_bytes=room.kv_bytes(fitting),
    )


def load(planned: Plan) -> LoadedModel:
    """Load it. A step may have all sequences and decoded tokens that the workload needs, whatever the options say.

    Raises DeviceError if a profile is wanted of a device that has none.
    """
    opened, options, workload = planned.opened, planned.options, planned.workload
    max_seqs = workload.max_sequences
    if not opened.spec.state_bytes:  # else each more would take a part of the cache
        max_seqs = max(options.max_num_seqs, max_seqs)
    executor = opened.load(
        options,
        kv_cache_bytes=planned.kv_cache_bytes,
        max_model_len=planned.max_model_len,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max(options.max_num_batched_tokens, workload.max_sequences),
        num_blocks=options.num_gpu_blocks_override,
    )
    native = getattr(executor, "native", None)
    profiler = native if workload.profile and isinstance(native, Profiler) else None
    if workload.profile and profiler is None:
        executor.close()
        raise DeviceError(f"--profile is not supported by the {opened.device.name} device")
    executor.warm_up(lambda done, steps: None)
    if opened.device.name == "cpu":
        from tidewheel.engine.devices.cpu.executor import CpuExecutor

        assert isinstance(executor, CpuExecutor)
        return LoadedModel(executor, executor.native.weight_bytes, executor.native.num_threads, profiler)
    return LoadedModel(executor, sum(tensor_bytes(opened).values()), _torch_threads(opened), profiler)


def tensor_bytes(opened: OpenedModel) -> dict[str, int]:
    """What each weight will take, as far as it is known before they are loaded."""
    shapes = tensor_shapes(opened.spec)
    if opened.device.name == "cpu":
        vector = TensorFormat("float32")
        return {name: opened.plan.formats.get(name, vector).num_bytes(shape) for name, shape in shapes.items()}
    dtype = _TORCH_COMPUTES_IN if opened.device.name == "torch" else opened.dtype
    return {name: math.prod(shape) * STORAGE[dtype].itemsize for name, shape in shapes.items()}


def _compute_ceiling(opened: OpenedModel) -> str:
    name = opened.device.name
    if name == "cpu":
        method = opened.quantization.method if opened.quantization else None
        return compute_ceiling(opened.dtype, method, keeps_bits=opened.keeps_bits)
    return f"{_TORCH_COMPUTES_IN if name == 'torch' else opened.dtype}_flops"


def _torch_threads(opened: OpenedModel) -> int | None:
    if opened.device.name not in ("torch", "graph-cpu"):
        return None
    import torch

    return torch.get_num_threads()
