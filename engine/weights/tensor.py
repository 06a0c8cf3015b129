"""Weights as a checkpoint stores them, and the source that gives them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from .bits import unpack
from .block_types import BlockType, dequantize
from .dtypes import DType
from .quantization import InputOrder, TensorFormat, stored_as_blocks
from .small_floats import SmallFloatTensor


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A weight in floats, often a read-only view of a memory map.

    `data` has the logical shape. Its numpy dtype follows `dtype`: float32, float16, or uint16 with the bits of
    bfloat16, in either byte order. It may be strided (transposed checkpoints). `mapped`: it is a view of a mapped file.
    Its pages may be freed once they are copied, because they are read again when needed. `origin` names the file and
    the tensor. Without an `origin` the tensor was generated, and needs no check.
    """

    data: NDArray[np.generic]
    dtype: DType
    mapped: bool = False
    origin: str | None = None


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix `[N, K]` of integers of 2, 3, 4 or 8 bits, with a scale for each group of a row's inputs.

    The weight of output n and stored input k, in group `g = k // group_size`, is
    `scales[n, g] * (q[n, k] - zeros[n, g])`. Stored input k is the model's input `input_order[k]`; checkpoints whose
    groups are chosen by importance (GPTQ's act-order, https://arxiv.org/abs/2210.17323) have an order of their own.

    `codes [N, ceil(K * bits / 8)] uint8` holds q, the first input in the lowest bits: unsigned (uint) or in two's
    complement (int). `scales` is `[N, ceil(K / group_size)]`. `zeros`, integers of the same shape, and `input_order
    [K]` may be None: all zeros are 0, the order is the model's. `origin` names the file and the tensor.

    Raises ValueError for arrays that do not fit together.
    """

    shape: tuple[int, int]
    format: Literal["uint", "int"]
    bits: Literal[2, 3, 4, 8]
    group_size: int
    codes: NDArray[np.uint8]
    scales: DenseTensor
    zeros: NDArray[np.integer] | None = None
    input_order: NDArray[np.integer] | None = None
    origin: str | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.shape
        groups = (outputs, -(-inputs // self.group_size))
        if self.codes.shape != (outputs, -(-inputs * self.bits // 8)):
            raise ValueError(f"codes of shape {self.codes.shape} are not {self.bits} bits for each of {self.shape}")
        if self.scales.data.shape != groups or (self.zeros is not None and self.zeros.shape != groups):
            raise ValueError(f"scales and zeros must be {groups} for groups of {self.group_size} in {self.shape}")
        if self.input_order is not None and not np.array_equal(np.sort(self.input_order), np.arange(inputs)):
            raise ValueError(f"input_order must name each of {inputs} inputs once")

    @property
    def stored_format(self) -> TensorFormat:
        """How a device may keep it. The codes are not looked at."""
        middle = 0 if self.format == "int" else 1 << (self.bits - 1)
        return TensorFormat(
            "grid",
            min(self.group_size, self.shape[1]),
            bool(middle if self.zeros is None else (self.zeros != middle).any()),
            self.bits,
            self.scales.dtype,
            None if self.input_order is None else InputOrder(self.input_order),
        )

    def dequantize(self) -> NDArray[np.float32]:
        """The weights, `[N, K]`, inputs in the model's order: the reference for all kernels that compute with codes."""
        inputs = self.shape[1]
        values = unpack(self.codes, self.bits, inputs).astype(np.float32)
        if self.format == "int":
            values[values >= 1 << (self.bits - 1)] -= 1 << self.bits
        group_size = min(self.group_size, inputs)  # nothing as large as a file's largest number is made
        if self.zeros is not None:
            values -= np.repeat(self.zeros, group_size, axis=1)[:, :inputs]
        values *= np.repeat(to_float32(self.scales), group_size, axis=1)[:, :inputs]
        if self.input_order is None:
            return values
        ordered = np.empty_like(values)
        ordered[:, self.input_order] = values
        return ordered


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A matrix `[N, K]` in blocks of a GGUF type, as the file has it.

    `data [N, bytes of a row] uint8` is often a read-only view of a memory map, which `mapped` says as in DenseTensor.
    Row n of the matrix is row `row_order[n]` of the data; without a `row_order` they are the same. `origin` names the
    file and the tensor.

    Raises ValueError for data that does not fit.
    """

    kind: BlockType
    data: NDArray[np.uint8]
    mapped: bool = False
    row_order: NDArray[np.int32] | None = None
    origin: str | None = None

    def __post_init__(self) -> None:
        if self.kind.parts is None or self.data.ndim != 2 or self.data.shape[1] % self.kind.bytes:
            raise ValueError(f"data of shape {self.data.shape} is not rows of {self.kind.name} blocks")
        if self.row_order is not None and self.row_order.shape != self.data.shape[:1]:
            raise ValueError(f"row_order must name each of {self.data.shape[0]} rows")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.data), self.data.shape[1] // self.kind.bytes * self.kind.elements

    @property
    def stored_format(self) -> TensorFormat:
        """How a device may keep it."""
        return stored_as_blocks(self.kind)

    def dequantize(self) -> NDArray[np.float32]:
        """The weights, `[N, K]`: the reference for all kernels that compute with the blocks."""
        values = dequantize(np.ascontiguousarray(self.data), self.kind).reshape(self.shape)
        return values if self.row_order is None else values[self.row_order]


WeightTensor = DenseTensor | QuantizedTensor | BlockTensor | SmallFloatTensor


class WeightSource(Protocol):
    """All of a model's weights under Tidewheel's names (`tensor_shapes`), shapes already checked."""

    dtype: DType  # what most of the checkpoint is stored as; `--dtype auto` follows it
    # Identifies these weights without reading them: equal only for equal content. None: not known.
    identity: str | None

    def __getitem__(self, name: str) -> WeightTensor: ...

    def stored_format(self, name: str) -> TensorFormat | None:
        """The format of a quantized tensor, where devices may keep its bits; None: it is in floats, or becomes floats.

        Reads no more of the tensor than it needs. Raises ModelError for one that is not what it should be.
        """
        ...

    def __iter__(self) -> Iterator[str]: ...


def to_float32(tensor: WeightTensor) -> NDArray[np.float32]:
    """A contiguous, writable float32 copy of a weight; of a dense one exact for every dtype."""
    if not isinstance(tensor, DenseTensor):
        return tensor.dequantize()
    if tensor.dtype == "bfloat16":
        return (tensor.data.astype(np.uint32, order="C") << 16).view(np.float32)
    return np.array(tensor.data, dtype=np.float32, order="C")
