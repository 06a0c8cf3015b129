"""Quantized matrices as accelerators keep them: small numbers, with a scale for each group of a row's inputs.

What a checkpoint has quantized keeps its numbers: only their order in memory changes. Integers of 2 and 3 bits are kept
in 4, and those of 5 and 6 bits in 8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..weights.block_types import BlockKind
from ..weights.dtypes import STORAGE
from ..weights.quantization import TensorFormat
from ..weights.small_floats import E2M1, E4M3
from ..weights.tensor import DenseTensor, WeightTensor

Values = Literal["int4", "e2m1", "table4", "int8", "e4m3"]
IN_FOUR_BITS: tuple[Values, ...] = ("int4", "e2m1", "table4")

RUN = 64
"""Inputs whose codes of 4 bits lie together: byte i of 32 has input i in its low half, and input i + 32 in its high."""

WHOLE_ROW = 1 << 30


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A matrix `[N, K]`. The weight of output n and stored input k, in group `g = k // group_size`, is

    `(value - zero) * (scale * factor) - minimum * minimum_factor`, in float32. The value is

    - `int4`: four bits of `codes [N, ceil(K / RUN) * RUN / 2] uint8`, less `middle`;
    - `e2m1`: the float that such four bits are;
    - `table4`: the number of `table [16] float32` that they name;
    - `int8`: a number of `codes [N, K] int8`;
    - `e4m3`: the float that a byte of `codes [N, K] uint8` is.

    `scales`, `zeros` and `minima` are `[N, ceil(K / group_size)]`. A factor is for `factor_run` groups of a row. What
    is None has no effect. Floats are float32, float16, or uint16 with the bits of bfloat16; all else are integers.
    Stored input k is the model's input `input_order[k]`; None: the order is the model's.
    """

    values: Values
    shape: tuple[int, int]
    group_size: int
    codes: NDArray[np.generic]
    scales: NDArray[np.generic]
    factors: NDArray[np.generic] | None = None
    zeros: NDArray[np.integer] | None = None
    minima: NDArray[np.generic] | None = None
    minimum_factors: NDArray[np.generic] | None = None
    factor_run: int = 1
    middle: int = 0
    table: NDArray[np.float32] | None = None
    input_order: NDArray[np.int32] | None = None

    @property
    def arrays(self) -> dict[str, Any]:
        """What there is of codes, scales and the like, by name. Each has a row for every output."""
        found = {name: getattr(self, name) for name in _ARRAYS}
        return {name: array for name, array in found.items() if array is not None}

    @property
    def num_bytes(self) -> int:
        """What an accelerator needs for it, without padding."""
        arrays = [*self.arrays.values(), *([] if self.input_order is None else [self.input_order])]
        return sum(int(array.nbytes) for array in arrays)

    def rows(self, index: slice | NDArray[np.integer]) -> GroupedMatrix:
        """The matrix with these rows alone, in this order."""
        arrays: dict[str, Any] = {name: np.ascontiguousarray(array[index]) for name, array in self.arrays.items()}
        return replace(self, shape=(len(arrays["codes"]), self.shape[1]), **arrays)

    def inputs(self, start: int, stop: int) -> GroupedMatrix:
        """The matrix with these inputs alone. They begin and end with groups, runs of codes and of factors."""
        inputs, whole = stop - start, self.shape[1]

        def part(array: NDArray[np.generic]) -> NDArray[np.generic]:
            size = array.shape[1]
            return array if size == 1 else np.ascontiguousarray(array[:, start * size // whole : stop * size // whole])

        arrays: dict[str, Any] = {name: part(array) for name, array in self.arrays.items()}
        return replace(self, shape=(self.shape[0], inputs), group_size=min(self.group_size, inputs), **arrays)

    def dequantize(self) -> NDArray[np.float32]:
        """The weights, `[N, K]`, inputs in the model's order: the reference for all kernels that compute with codes."""
        outputs, inputs = self.shape

        def spread(floats: NDArray[np.float32]) -> NDArray[np.float32]:
            return np.repeat(floats, self.group_size, axis=1)[:, :inputs]

        values = self._numbers()
        if self.zeros is not None:
            values -= spread(self.zeros.astype(np.float32))
        values *= spread(self._with_factors(self.scales, self.factors))
        if self.minima is not None:
            values -= spread(self._with_factors(self.minima, self.minimum_factors))
        if self.input_order is None:
            return values
        ordered = np.empty((outputs, inputs), np.float32)
        ordered[:, self.input_order] = values
        return ordered

    def floats(self) -> tuple[NDArray[np.generic], NDArray[np.float32] | None]:
        """Scales and minima with their factors and zeros, so that a weight is `value * scale - minimum`.

        Both are float32, but scales that are bfloat16 stay so. A zero's product with a scale is rounded.
        """
        scales = self._with_factors(self.scales, self.factors)
        minima = None if self.minima is None else self._with_factors(self.minima, self.minimum_factors)
        if self.zeros is not None:
            minima = self.zeros.astype(np.float32) * scales
        return (self.scales if self.scales.dtype == np.uint16 else scales), minima

    def _with_factors(self, numbers: NDArray[np.generic], factors: NDArray[np.generic] | None) -> NDArray[np.float32]:
        floats = _as_float32(numbers)
        if factors is None:
            return floats
        return np.repeat(_as_float32(factors), self.factor_run, axis=1)[:, : floats.shape[1]] * floats

    def _numbers(self) -> NDArray[np.float32]:
        if self.values == "int8":
            return self.codes.astype(np.float32)
        if self.values == "e4m3":
            return E4M3[self.codes.view(np.uint8)]
        nibbles = unpack_runs(self.codes.view(np.uint8), self.shape[1])
        if self.values == "e2m1":
            return E2M1[nibbles]
        return nibbles.astype(np.float32) - np.float32(self.middle) if self.table is None else self.table[nibbles]


_ARRAYS = ("codes", "scales", "factors", "zeros", "minima", "minimum_factors")


class Layout(NamedTuple):
    """How much of what a format has: bytes for each group's numbers, and for each `run` groups' factors.

    `float_bytes` are those of a group if the products of its numbers and factors are kept as floats.
    """

    values: Values
    group_size: int
    group_bytes: int
    factor_bytes: int = 0
    run: int = 1
    float_bytes: int = 4

    def with_floats(self) -> Layout:
        """Without factors: see `GroupedMatrix.floats`."""
        return self._replace(group_bytes=self.float_bytes, factor_bytes=0)

    def num_bytes(self, shape: Sequence[int]) -> int:
        outputs, inputs = shape
        groups = -(-inputs // self.group_size)
        codes = -(-inputs // RUN) * RUN // 2 if self.values in IN_FOUR_BITS else inputs
        return outputs * (codes + groups * self.group_bytes + -(-groups // self.run) * self.factor_bytes)


BLOCKS: Mapping[BlockKind, Layout] = MappingProxyType(
    {
        "q4_0": Layout("int4", 32, 2),
        "q4_1": Layout("int4", 32, 4, float_bytes=8),
        "q5_0": Layout("int8", 32, 2),
        "q5_1": Layout("int8", 32, 4, float_bytes=8),
        "q8_0": Layout("int8", 32, 2),
        "q2_k": Layout("int4", 16, 2, 4, 16, 8),
        "q3_k": Layout("int4", 16, 1, 2, 16),
        "q4_k": Layout("int4", 32, 2, 4, 8, 8),
        "q5_k": Layout("int8", 32, 2, 4, 8, 8),
        "q6_k": Layout("int8", 16, 1, 2, 16),
        "iq4_nl": Layout("table4", 32, 2),
        "iq4_xs": Layout("table4", 32, 1, 2, 8),
        "mxfp4": Layout("e2m1", 32, 2, float_bytes=2),
    }
)


def layout_of(format: TensorFormat) -> Layout | None:
    """None: a format of floats."""
    if (block := format.block_kind) is not None:
        return BLOCKS[block]
    group, zeros = format.group_size, format.zero_points
    if format.kind == "int8":
        return BLOCKS["q8_0"]
    if format.kind == "int8-channel":
        return Layout("int8", WHOLE_ROW, 4)
    if format.kind == "int4":
        return Layout("int4", group, 2 + zeros, float_bytes=4 + 4 * zeros)
    if format.kind == "grid":
        in_eight, scale = format.bits > 4, STORAGE[format.scales].itemsize
        floats = (2 if format.scales == "bfloat16" else 4) + 4 * zeros
        zero = (2 if in_eight else 1) * zeros
        return Layout("int8" if in_eight else "int4", group, scale + zero, float_bytes=floats)
    if format.kind == "nvfp4":
        return Layout("e2m1", group, 2, 4, WHOLE_ROW)
    if format.kind == "e4m3" or format.kind == "table4":
        return Layout(format.kind, group, 4)
    return None


def num_bytes(format: TensorFormat, shape: Sequence[int]) -> int:
    """What an accelerator needs for a weight, without padding."""
    layout = layout_of(format)
    if layout is None:
        return format.num_bytes(shape)
    return layout.num_bytes(shape) + (0 if format.input_order is None else 4 * shape[1])


def num_bytes_with_floats(format: TensorFormat, shape: Sequence[int]) -> int:
    """The same for one that keeps scales and minima as floats: see `GroupedMatrix.floats`."""
    layout = layout_of(format)
    if layout is None:
        return format.num_bytes(shape)
    return layout.with_floats().num_bytes(shape) + (0 if format.input_order is None else 4 * shape[1])


def tensor_shape(tensor: WeightTensor | GroupedMatrix) -> tuple[int, ...]:
    """The logical shape of any weight."""
    return tensor.data.shape if isinstance(tensor, DenseTensor) else tensor.shape


def joined(parts: Sequence[GroupedMatrix]) -> GroupedMatrix:
    """Matrices of one format and order of inputs, one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    arrays: dict[str, Any] = {name: np.concatenate([part.arrays[name] for part in parts]) for name in first.arrays}
    return replace(first, shape=(len(arrays["codes"]), first.shape[1]), **arrays)


def pack_runs(nibbles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Numbers of 4 bits `[N, K]` as GroupedMatrix.codes has them; 0 where the last run has no inputs."""
    outputs, inputs = nibbles.shape
    runs = np.zeros((outputs, -(-inputs // RUN) * RUN), np.uint8)
    runs[:, :inputs] = nibbles
    first, second = np.moveaxis(runs.reshape(outputs, -1, 2, RUN // 2), 2, 0)
    return np.asarray(first | second << 4, np.uint8).reshape(outputs, -1)


def unpack_runs(codes: NDArray[np.uint8], inputs: int) -> NDArray[np.uint8]:
    """The inverse of `pack_runs`."""
    halves = codes.reshape(len(codes), -1, 1, RUN // 2)
    return np.concatenate([halves & 15, halves >> 4], axis=2).reshape(len(codes), -1)[:, :inputs]


def _as_float32(array: NDArray[np.generic]) -> NDArray[np.float32]:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)
