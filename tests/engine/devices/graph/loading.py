"""Loads models on the graph executor with few buckets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidewheel.engine.devices.graph.device import GraphDevice, graph_cpu
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.devices.memory_options import MemoryOptions
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import DecoderSpec
from tidewheel.engine.weights import open_weights, read_config
from tidewheel.engine.weights.dtypes import DType
from tidewheel.engine.weights.tensor import WeightSource

EAGER = GraphOptions(
    enforce_eager=True,
    prompt_bs_bucket_max=4,
    prompt_seq_bucket_min=32,
    prompt_seq_bucket_step=64,
    decode_seq_bucket_min=64,
    decode_seq_bucket_step=128,
)
FEW = GraphOptions(
    prompt_bs_bucket_max=1,
    prompt_seq_bucket_min=32,
    prompt_seq_bucket_step=32,
    prompt_seq_bucket_max=64,
    decode_bs_bucket_min=4,
    decode_seq_bucket_min=64,
    decode_seq_bucket_step=64,
)


def load(
    model: Path | tuple[DecoderSpec, WeightSource],
    options: GraphOptions = EAGER,
    *,
    memory: MemoryOptions | None = None,
    make_device: Callable[[GraphOptions, MemoryOptions], GraphDevice] = graph_cpu,
    dtype: DType = "float32",
    max_num_seqs: int = 16,
    max_model_len: int = 256,
    max_num_batched_tokens: int = 256,
    num_blocks: int | None = 256,
    kv_cache_bytes: int | None = 1,
    **changes: Any,
) -> Any:
    """The model of a folder, or of a spec with its weights, on graph-cpu. It is not warmed up."""
    if isinstance(model, Path):
        description = describe(read_config(model))
        spec, weights = description.spec, open_weights(model, description)
    else:
        spec, weights = model
    executor_options = ExecutorOptions(
        dtype=dtype,
        kv_cache_bytes=kv_cache_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        **changes,
    )
    device = make_device(options, memory or MemoryOptions())
    return device.load(spec, weights, executor_options)
