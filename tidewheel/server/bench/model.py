"""The model under test: found, checked against the workload, and loaded with just the cache that this needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.base import Device, DType, Executor, ExecutorOptions, KvCacheDType, WeightSource
from tidewheel.engine.memory import available_memory_bytes
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import DecoderSpec, tensor_shapes
from tidewheel.engine.weights import open_weights, read_config, resolve
from tidewheel.engine.weights.dtypes import STORAGE, parse_dtype, parse_kv_cache_dtype
from tidewheel.server.bench.workload import Workload, check_fits
from tidewheel.server.options import ModelOptions
from tidewheel.server.serve import DEMO_MODEL, DEMO_MODEL_NAME

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Plan:
    """A model that the workload fits. `compute_dtype` is what the device multiplies in."""

    name: str
    spec: DecoderSpec
    weights: WeightSource
    device: Device
    dtype: DType
    compute_dtype: DType
    kv_cache_dtype: KvCacheDType
    tokenizer_folder: Path
    max_model_len: int
    kv_cache_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`weight_bytes` are as the device packs them."""

    executor: Executor
    weight_bytes: int
    num_threads: int


def plan(options: ModelOptions, workload: Workload) -> Plan:
    """Find the model and see that the workload fits. Raises ModelError and DeviceError, saying what to change."""
    with_weights = options.load_format != "dummy"
    folder = resolve(options.model or str(DEMO_MODEL), options.revision, options.download_dir, with_weights)
    description = describe(read_config(folder), options.max_model_len)
    spec = description.spec
    device = get_device(options.device)
    weights = open_weights(folder, description, options.load_format, options.seed)
    dtype = device.default_dtype(weights.dtype) if options.dtype == "auto" else parse_dtype(options.dtype)
    kv_cache_dtype = dtype if options.kv_cache_dtype == "auto" else parse_kv_cache_dtype(options.kv_cache_dtype)
    compute_dtype: DType = "float32" if device.name == "torch" else dtype
    kv_bytes_per_token = device.kv_bytes_per_token(spec, kv_cache_dtype)
    longest_context = options.max_model_len or spec.max_positions
    kv_cache_bytes = check_fits(
        workload,
        longest_context=longest_context,
        kv_bytes_per_token=kv_bytes_per_token,
        weight_bytes=_parameters(spec) * STORAGE[compute_dtype].itemsize,
        kv_cache_limit_bytes=None if options.kv_cache_space is None else int(options.kv_cache_space * _GIB),
        available_bytes=available_memory_bytes(),
    )
    tokenizer_folder = folder
    if options.tokenizer is not None:
        tokenizer_folder = resolve(options.tokenizer, None, options.download_dir, with_weights=False)
    return Plan(
        name=options.model or DEMO_MODEL_NAME,
        spec=spec,
        weights=weights,
        device=device,
        dtype=dtype,
        compute_dtype=compute_dtype,
        kv_cache_dtype=kv_cache_dtype,
        tokenizer_folder=tokenizer_folder,
        max_model_len=longest_context,
        kv_cache_bytes=kv_cache_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
    )


def load(planned: Plan, options: ModelOptions, workload: Workload) -> LoadedModel:
    """Load it. A step may have as many sequences and decoded tokens as the workload needs, whatever the options say."""
    executor = planned.device.load(
        planned.spec,
        planned.weights,
        ExecutorOptions(
            dtype=planned.dtype,
            kv_cache_bytes=planned.kv_cache_bytes,
            max_model_len=planned.max_model_len,
            max_num_seqs=max(options.max_num_seqs, workload.most_sequences),
            max_num_batched_tokens=max(options.max_num_batched_tokens, workload.most_sequences),
            threads_bind=options.threads_bind,
            kv_cache_dtype=planned.kv_cache_dtype,
        ),
    )
    if planned.device.name == "torch":
        import torch

        weight_bytes = _parameters(planned.spec) * STORAGE[planned.compute_dtype].itemsize
        return LoadedModel(executor, weight_bytes, torch.get_num_threads())
    from tidewheel.engine.devices.cpu import CpuExecutor

    assert isinstance(executor, CpuExecutor)
    return LoadedModel(executor, executor.native.weight_bytes, executor.native.num_threads)


def _parameters(spec: DecoderSpec) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(spec).values())
