"""The format that a device keeps each weight in: floats, a quantized checkpoint's own, or fewer bits by --quantization.

With --quantization weights are quantized while they are loaded. What is quantized is multiplied with activations
quantized to int8.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..errors import ModelError
from .block_mix import block_kind
from .block_types import KINDS, BlockKind, BlockType
from .dtypes import STORAGE, DType

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Method = Literal["int8", "int8-channel", "int4", "int4-fast", "q4_k_m", "q5_k_m", "q6_k", "q8_0", "fp8"]
Packed = Literal["int8", "int8-channel", "int4"]  # what packing itself quantizes to
SmallFloat = Literal["e4m3", "nvfp4", "table4"]

ACCELERATOR_METHODS: tuple[Method, ...] = get_args(Method)
CPU_METHODS = tuple(method for method in ACCELERATOR_METHODS if method != "fp8")

GROUP_SIZES = (32, 64, 128)
_INT8_GROUP = 32
_GROUP_NUMBER_BYTES = 2  # a group's scale, and its zero point where it has one
_CHANNEL_SCALE_BYTES = 4
_FLOAT_SCALE_BYTES = 4
_SMALL_FLOAT_BITS: dict[SmallFloat, int] = {"e4m3": 8, "nvfp4": 4, "table4": 4}
_EMBEDDINGS = ("embed.weight", "embed.per_layer", "head.weight")
_WITHIN_ATTENTION = (".latent_k_up.weight", ".latent_v_up.weight", ".pos_k.weight", ".pos_q.weight")
_ROUTERS = (".router.weight", ".shared_gate.weight")


class Quantization(Struct, frozen=True):
    """How weights are stored.

    `int8` has a scale for every 32 inputs of an output. Activations are quantized in groups of 32 too.
    `int8-channel` has one scale for each output, and one for each token of the activations. The MLP's last matrix,
    whose inputs have outliers, and embedding and head are as in int8. `int4-fast` has a scale for every `group_size`
    inputs, and with `zero_points` a zero point too. Its embedding and head are int8; activations are quantized as for
    int8. `fp8` has e4m3 floats with one scale for each output; its embedding and head are int8. All others have blocks
    of GGUF's types, which `block_mix` chooses. Accelerators quantize no activations.
    """

    method: Method
    group_size: int = 32
    zero_points: bool = False

    def __str__(self) -> str:
        if self.method != "int4-fast":
            return self.method
        return f"int4-fast in groups of {self.group_size}{' with zero points' if self.zero_points else ''}"


class InputOrder:
    """An order of inputs, `indices [K] int32`. Equal to others with the same indices."""

    __slots__ = ("_digest", "indices")

    def __init__(self, indices: NDArray[np.integer]) -> None:
        self.indices: NDArray[np.int32] = np.ascontiguousarray(indices, np.int32)
        self._digest = hashlib.sha256(self.indices.tobytes()).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InputOrder) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """The format of one weight: floats, what a device quantizes to, or what a quantized checkpoint has.

    `group_size` counts inputs of an output that share a scale. It is for int8 (32), int4, grid and small floats. `grid`
    has integers of `bits` bits, and scales of the type `scales`; input i of the stored matrix is number i of
    `input_order`, if there is one. A type of GGUF's blocks says all by its name. SmallFloatTensor says what kinds of
    small floats there are, and what a `table` is, and ScaleCodes what `scale_table` and `scale_run` are.
    """

    kind: DType | Packed | Literal["grid"] | BlockKind | SmallFloat
    group_size: int = _INT8_GROUP
    zero_points: bool = False
    bits: int = 0
    scales: DType = "float32"
    input_order: InputOrder | None = field(default=None, repr=False)
    table: tuple[float, ...] | None = field(default=None, repr=False)
    scale_table: tuple[float, ...] | None = field(default=None, repr=False)
    scale_run: int = 0

    @property
    def is_stored(self) -> bool:
        """Whether it is a quantized checkpoint's own."""
        return self.kind == "grid" or self.kind in KINDS or self.is_small_floats

    @property
    def block_kind(self) -> BlockKind | None:
        """The type of GGUF's blocks that it is; None: it is none."""
        return self.kind if self.kind in KINDS else None

    @property
    def is_small_floats(self) -> bool:
        """Whether it is a quantized checkpoint's of floats of 8 or 4 bits."""
        return self.kind in _SMALL_FLOAT_BITS

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a weight of that shape, with its scales, without a device's padding."""
        parameters = math.prod(shape)
        if self.kind == "float32" or self.kind == "float16" or self.kind == "bfloat16":
            return parameters * STORAGE[self.kind].itemsize
        if self.kind == "int8-channel":
            return parameters + shape[0] * _CHANNEL_SCALE_BYTES
        if (kind := self.block_kind) is not None:
            block = KINDS[kind]
            return parameters // block.elements * block.bytes
        groups = shape[0] * -(-shape[1] // self.group_size)
        if self.kind == "e4m3" or self.kind == "nvfp4" or self.kind == "table4":
            scales = groups * (1 if self.kind == "nvfp4" else _FLOAT_SCALE_BYTES)
            if self.scale_table is not None:
                scales = groups + (groups // self.scale_run + shape[0]) * _FLOAT_SCALE_BYTES
            return -(-parameters * _SMALL_FLOAT_BITS[self.kind] // 8) + scales
        if self.kind == "grid":
            return -(-parameters * self.bits // 8) + groups * (STORAGE[self.scales].itemsize + self.zero_points)
        values = parameters if self.kind == "int8" else -(-parameters // 2)
        return values + groups * _GROUP_NUMBER_BYTES * (1 + self.zero_points)

    def __str__(self) -> str:
        if self.kind == "e4m3":
            return f"e4m3 in groups of {self.group_size}"
        if self.kind == "table4":
            scales = "" if self.scale_table is None else ", scales in 8 bits"
            return f"4 bits by a table in groups of {self.group_size}{scales}"
        if self.kind != "grid":
            return self.kind
        return f"{self.bits} bits in groups of {self.group_size}{' with zero points' if self.zero_points else ''}"


def is_method(name: str) -> TypeIs[Method]:
    """Whether it is a method to quantize with while loading, and not a checkpoint's own."""
    return name in get_args(Method)


def is_router(name: str) -> bool:
    """Whether the weight of that name decides which experts a token has, or what streams tell each other.

    Rounded, it would choose others.
    """
    return name.endswith(_ROUTERS)


def stays_in_floats(name: str) -> bool:
    """Whether no quantization changes the matrix of that name."""
    # A table that is only looked up; or, of attention to latents or with positions, small matrices between queries,
    # scores and values.
    return is_router(name) or name == "embed.positions" or name.endswith(_WITHIN_ATTENTION)


def stored_as_blocks(kind: BlockType) -> TensorFormat:
    """The format of a tensor in blocks. Raises ValueError for plain floats."""
    name = kind.name.lower()
    if name not in KINDS:
        raise ValueError(f"{kind.name} has no blocks")
    return TensorFormat(name)


def format_of(
    name: str,
    shape: Sequence[int],
    dtype: DType,
    quantization: Quantization | None,
    stored: TensorFormat | None = None,
    num_layers: int = 0,
    *,
    tied: bool = False,
) -> TensorFormat:
    """The format of one of `tensor_shapes`' weights in a model of that dtype. Vectors and routers are float32.

    `stored` is the format of a quantized checkpoint. It is kept, unless there is a quantization to convert to. Of
    `num_layers` layers some have more bits where a method's blocks are chosen by layer, and an embedding has if it is
    `tied` to the head.
    """
    if len(shape) == 1 or is_router(name):
        return TensorFormat("float32")
    if quantization is None:
        return stored or TensorFormat(dtype)
    if stays_in_floats(name):
        return TensorFormat(dtype)
    method = quantization.method
    if method != "int8" and method != "int8-channel" and method != "int4-fast" and method != "fp8":
        kind = block_kind(method, name, shape[1], num_layers, tied=tied)
        return TensorFormat(dtype) if kind is None else TensorFormat(kind)
    # The activation function's results have outliers: one scale a row is too coarse for them.
    outliers = method == "int8-channel" and name.endswith(".down.weight")
    if name in _EMBEDDINGS or outliers:
        return TensorFormat("int8")
    if method == "fp8":
        return TensorFormat("e4m3", shape[1])
    if method == "int4-fast":
        return TensorFormat("int4", quantization.group_size, quantization.zero_points)
    return TensorFormat(method)


def parse_quantization(
    method: Method | None, group_size: int | None = None, zero_points: bool = False
) -> Quantization | None:
    """The quantization that the options ask for; None: none. Raises ModelError, naming what does not go together."""
    if method != "int4-fast" and (group_size is not None or zero_points):
        option = "--quantization-group-size" if group_size is not None else "--quantization-zero-points"
        raise ModelError(f"{option} goes with --quantization int4-fast only")
    if method is None:
        return None
    if group_size is not None and group_size not in GROUP_SIZES:
        raise ModelError(f"quantization groups must be of 32, 64 or 128, got {group_size}")
    return Quantization(method, group_size or 32, zero_points)
