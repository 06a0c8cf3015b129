"""Decoders for tests of devices: specs put together by hand, with random weights."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from harness import Harness, largest_step, make_device
from numpy.typing import NDArray

from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.models.spec import (
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    ResidualBlockSpec,
    RopeSpec,
    tensor_shapes,
)
from tidewheel.engine.weights.dtypes import DType, KvCacheDType
from tidewheel.engine.weights.quantization import TensorFormat
from tidewheel.engine.weights.tensor import DenseTensor

VOCAB_SIZE = 96
ROPE = RopeSpec(tuple(10000.0 ** (-i / 20) for i in range(20)))
PLAIN = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=40, scale=40**-0.5)
SLOPES = tuple(2.0 ** (-8 * (head + 1) / 6) for head in range(6))
NORM = NormSpec("rms", 1e-5)
MLP = MlpSpec(96, "silu", gated=True)


def decoder_of(*layers: LayerSpec) -> DecoderSpec:
    return DecoderSpec(
        family="test",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        max_positions=2048,
        embedding=EmbeddingSpec(64),
        layers=layers,
        final_norm=NORM,
        head=HeadSpec(tied=False),
    )


def decoder(*attentions: AttentionSpec) -> DecoderSpec:
    """A layer for each, with an MLP behind it."""
    return decoder_of(*((ResidualBlockSpec(attention, NORM), ResidualBlockSpec(MLP, NORM)) for attention in attentions))


class RandomWeights:
    """Weights large enough for scores that differ by far more than rounding. A tensor's name decides what it holds."""

    dtype: DType = "float32"
    identity: str | None = None

    def __init__(self, spec: DecoderSpec) -> None:
        self._shapes = tensor_shapes(spec)

    def stored_format(self, name: str) -> TensorFormat | None:
        return None

    def __getitem__(self, name: str) -> DenseTensor:
        shape = self._shapes[name]
        random = np.random.default_rng(zlib.crc32(name.encode()))
        scale = 2.0 / shape[-1] ** 0.5 if len(shape) == 2 else 1.0
        return DenseTensor((random.standard_normal(shape, np.float32) * scale).astype(np.float32), "float32")

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)


def load(
    device_id: str,
    spec: DecoderSpec,
    dtype: DType = "float32",
    kv_cache_dtype: KvCacheDType = "float32",
    threads_bind: str | None = None,
    weights: Callable[[DecoderSpec], RandomWeights] = RandomWeights,
    layer_draft_tokens: int = 0,
) -> Executor:
    """The model of `spec` on the device, with room in the cache for 6144 tokens."""
    device = make_device(device_id, threads_bind)
    options = ExecutorOptions(
        dtype=dtype,
        kv_cache_bytes=6144 * device.kv_bytes_per_token(spec, kv_cache_dtype),
        max_model_len=spec.max_positions,
        **largest_step(device),
        kv_cache_dtype=kv_cache_dtype,
        layer_draft_tokens=layer_draft_tokens,
    )
    return device.load(spec, weights(spec), options)


def run(device_id: str, spec: DecoderSpec, chunk: int = 2048) -> NDArray[np.float32]:
    """The logits after each of 40 tokens, `[40, VOCAB_SIZE]`."""
    executor = load(device_id, spec)
    tokens = np.random.default_rng(4).integers(0, VOCAB_SIZE, 40).tolist()
    logits = Harness(executor).logits(tokens, chunk)
    executor.close()
    return logits


reference: Callable[[DecoderSpec], NDArray[np.float32]] = functools.cache(functools.partial(run, "torch"))
"""What the torch device computes."""
