"""Random matrices in the formats of quantized files, of about the size that a model's weights have."""

from __future__ import annotations

import functools
import zlib
from dataclasses import replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tidewheel.engine.models.spec import (
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    NormSpec,
    ResidualBlockSpec,
    tensor_shapes,
)
from tidewheel.engine.weights.bits import pack
from tidewheel.engine.weights.block_types import BLOCK_TYPES, BlockType
from tidewheel.engine.weights.dtypes import DType, bfloat16_bits
from tidewheel.engine.weights.quantization import SmallFloat, TensorFormat
from tidewheel.engine.weights.small_floats import ScaleCodes, SmallFloatTensor
from tidewheel.engine.weights.tensor import BlockTensor, DenseTensor, QuantizedTensor, WeightTensor

BLOCKS = {kind.name.lower(): kind for kind in BLOCK_TYPES.values() if kind.parts is not None}
# How much larger the second number of a block is than the first, so that weights are as often above 0 as below.
_BALANCE = {"q4_1": -7.5, "q5_1": -15.5, "q2_k": 1.5, "q4_k": 7.5, "q5_k": 15.5}
_GRIDS: dict[str, dict[str, Any]] = {
    "gptq-4": {"bits": 4, "group": 64, "scales": "float16", "order": True},
    "gptq-3": {"bits": 3, "group": 32, "scales": "float16", "zeros": True},
    "gptq-2": {"bits": 2, "group": 128, "scales": "float16", "zeros": True, "order": True},
    "awq": {"bits": 4, "group": 128, "scales": "float16", "zeros": True},
    "packed-4": {"bits": 4, "group": 32, "scales": "bfloat16"},
    "packed-8": {"bits": 8, "group": 1 << 30, "scales": "bfloat16"},
    "int8": {"bits": 8, "group": 1 << 30, "scales": "float32", "format": "int"},
    "int8-zeros": {"bits": 8, "group": 1 << 30, "scales": "float32", "format": "int", "zeros": True},
}
# The format, and the outputs and inputs of a block with one scale; 0 is all.
_SMALL_FLOATS: dict[str, tuple[SmallFloat, int, int]] = {
    "e4m3-block": ("e4m3", 128, 128),
    "e4m3-group": ("e4m3", 1, 32),
    "e4m3-channel": ("e4m3", 1, 0),
    "e4m3-tensor": ("e4m3", 0, 0),
    "nvfp4": ("nvfp4", 1, 16),
    "nf4": ("table4", 1, 64),
    "nf4-double": ("table4", 1, 64),  # whose scales are quantized too
}
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_NESTED_BLOCK = 256  # scales
KINDS = (*BLOCKS, *_GRIDS, *_SMALL_FLOATS)
SOME_KINDS = ("q4_k", "q6_k", "gptq-4", "awq", "int8", "e4m3-block", "mxfp4")
"""Those that differ most in how they are computed with."""


def decoder(tied: bool = True, num_layers: int = 2) -> DecoderSpec:
    """One whose matrices every kind can hold. With four layers it has as many of them as there are kinds."""
    norm = NormSpec("rms", 1e-5)
    layer = (
        ResidualBlockSpec(AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125), norm),
        ResidualBlockSpec(MlpSpec(512, "silu", gated=True), norm),
    )
    return DecoderSpec("test", 320, 256, 256, EmbeddingSpec(256), (layer,) * num_layers, norm, HeadSpec(tied=tied))


def holds(kind: str, shape: tuple[int, ...], looked_up: bool = False) -> bool:
    """Whether a matrix of that shape can be of that kind. The rows of a table have no order of inputs of their own."""
    inputs = shape[1]
    if kind in BLOCKS:
        return inputs % BLOCKS[kind].elements == 0
    if kind in _SMALL_FLOATS:
        format, _, group = _SMALL_FLOATS[kind]
        return inputs % 32 == 0 and (format == "e4m3" or inputs % group == 0)
    grid = _GRIDS[kind]
    return inputs % 32 == 0 and inputs % min(grid["group"], inputs) == 0 and not (looked_up and grid.get("order"))


@functools.lru_cache(maxsize=512)
def stored(kind: str, shape: tuple[int, int], seed: str) -> BlockTensor | QuantizedTensor | SmallFloatTensor:
    """A matrix of that kind, a function of `seed`."""
    random = np.random.default_rng(zlib.crc32(seed.encode()))
    if kind in _SMALL_FLOATS:
        tensor = _small_floats(shape, random, *_SMALL_FLOATS[kind])
        return _with_scale_codes(tensor, random) if kind == "nf4-double" else tensor
    return _blocks(BLOCKS[kind], shape, random) if kind in BLOCKS else _grid(shape, random, **_GRIDS[kind])


def _blocks(kind: BlockType, shape: tuple[int, int], random: np.random.Generator) -> BlockTensor:
    rows, inputs = shape
    blocks = random.integers(0, 256, (rows, inputs // kind.elements, kind.bytes), np.uint8)
    factors = np.exp(random.normal(size=blocks.shape[:2]) / 4)
    if kind.exponent:
        blocks[..., 0] = 119 + random.integers(0, 3, blocks.shape[:2])
        return BlockTensor(kind, blocks.reshape(rows, -1), origin="file: tensor")

    def scaled(scale: float) -> BlockTensor:
        for i, at in enumerate(kind.halves):
            numbers = factors * scale * (_BALANCE[kind.name.lower()] if i else 1)
            blocks[..., at : at + 2] = numbers.astype("<f2")[..., np.newaxis].view(np.uint8)
        return BlockTensor(kind, blocks.reshape(rows, -1), origin="file: tensor")

    return scaled(float(1 / (scaled(1.0).dequantize().std() * inputs**0.5)))


def _grid(
    shape: tuple[int, int],
    random: np.random.Generator,
    bits: Literal[2, 3, 4, 8],
    group: int,
    scales: DType,
    format: Literal["uint", "int"] = "uint",
    zeros: bool = False,
    order: bool = False,
) -> QuantizedTensor:
    rows, inputs = shape
    codes = pack(random.integers(0, 1 << bits, shape, np.uint8), bits)
    groups, middle = (rows, -(-inputs // group)), 1 << (bits - 1)
    numbers = np.exp(random.normal(size=groups) / 4) / (0.3 * (1 << bits) * inputs**0.5)
    points: NDArray[np.integer] = np.full(groups, 0 if format == "int" else middle, np.int16)
    if zeros:
        points += random.integers(-(middle // 2), middle // 2, groups, np.int16)
    return QuantizedTensor(
        shape,
        format,
        bits,
        group,
        codes,
        DenseTensor(_floats(numbers.astype(np.float32), scales), scales, origin="file: scales"),
        points,
        random.permutation(inputs) if order else None,
        origin="file: tensor",
    )


def _small_floats(
    shape: tuple[int, int], random: np.random.Generator, kind: SmallFloat, outputs: int, inputs: int
) -> SmallFloatTensor:
    rows, columns = shape
    group = inputs or columns
    codes = random.integers(0, 256, (rows, columns if kind == "e4m3" else columns // 2), np.uint8)
    if kind == "e4m3":
        numbers = np.clip(random.normal(size=shape) * 64, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        codes = numbers.view(np.uint8)
    blocks = (-(-rows // (outputs or rows)), -(-columns // group))
    factors = np.exp(random.normal(size=blocks) / 4)[np.arange(rows) // (outputs or rows)]
    if kind == "nvfp4":
        local = (factors * 100).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        divisors = np.full(rows, 300 * columns**0.5, np.float32)
        return SmallFloatTensor(kind, shape, group, codes, local, divisors, origin="file: tensor")
    deviation = 64 if kind == "e4m3" else 0.5
    scales = (factors / (deviation * columns**0.5)).astype(np.float32)
    table = _NF4 if kind == "table4" else None
    return SmallFloatTensor(kind, shape, group, codes, scales, table=table, origin="file: tensor")


def _with_scale_codes(tensor: SmallFloatTensor, random: np.random.Generator) -> SmallFloatTensor:
    rows, groups = tensor.scales.shape
    run, middle = groups, float(tensor.scales.mean())
    largest = (random.random((rows, groups // run), np.float32) + np.float32(0.5)) * np.float32(middle)
    offsets = random.random(rows, np.float32) * np.float32(middle)
    table = tuple(np.sort(random.random(256, np.float32)).tolist())
    codes = random.integers(0, 256, (rows, groups), np.uint8)
    return replace(tensor, scales=codes, scale_codes=ScaleCodes(table, run, largest, offsets))


def _floats(numbers: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    return bfloat16_bits(numbers) if dtype == "bfloat16" else numbers.astype(dtype)


class StoredWeights:
    """A model whose matrices are of these kinds, one after the other in the order of their names. `dequantized`: as the
    floats that they stand for. Tables that are looked up have no order of inputs.
    """

    dtype: DType = "bfloat16"
    identity: str | None = "stored"

    def __init__(self, spec: DecoderSpec, *kinds: str, dequantized: bool = False) -> None:
        self._shapes = tensor_shapes(spec)
        matrices = [name for name, shape in self._shapes.items() if len(shape) == 2]
        self.kinds = {name: kinds[i % len(kinds)] for i, name in enumerate(matrices)}
        if not holds(self.kinds["embed.weight"], self._shapes["embed.weight"], looked_up=True):
            self.kinds["embed.weight"] = "q6_k"
        self._dequantized = dequantized

    def __iter__(self) -> Any:
        return iter(self._shapes)

    def __getitem__(self, name: str) -> WeightTensor:
        shape = self._shapes[name]
        if len(shape) != 2:
            return DenseTensor(np.ones(shape, np.float32), "float32")
        tensor = stored(self.kinds[name], (shape[0], shape[1]), name)
        return DenseTensor(tensor.dequantize(), "float32") if self._dequantized else tensor

    def stored_format(self, name: str) -> TensorFormat | None:
        tensor = self[name]
        return None if isinstance(tensor, DenseTensor) else tensor.stored_format

    def file_bytes(self) -> int:
        """The bytes of all tensors as a file has them."""
        total = 0
        for name in self:
            tensor = self[name]
            if isinstance(tensor, QuantizedTensor):
                numbers = 0 if tensor.zeros is None else -(-tensor.zeros.size * tensor.bits // 8)
                total += tensor.codes.nbytes + tensor.scales.data.nbytes + numbers
            elif isinstance(tensor, SmallFloatTensor):
                outputs = _SMALL_FLOATS[self.kinds[name]][1] or len(tensor.scales)
                total += tensor.codes.nbytes + tensor.scales.nbytes // outputs
                if tensor.scale_codes is not None:
                    total += -(-tensor.scales.size // _NESTED_BLOCK) * 4
            else:
                total += tensor.data.nbytes
        return total
