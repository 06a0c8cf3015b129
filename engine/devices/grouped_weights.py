"""Quantized matrices as accelerators keep them: small numbers, with a scale for each group of a row's inputs.

What a checkpoint has quantized keeps its numbers: only their order in memory changes. Integers of 2 and 3 bits are kept
in 4, and those of 5 and 6 bits in 8.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cancellation import Cancellation
from ..models.spec import DecoderSpec, tensor_shapes
from ..weights.bits import unpack
from ..weights.block_types import BlockKind
from ..weights.dtypes import STORAGE, DType, bfloat16_bits
from ..weights.finite import read_finite
from ..weights.quantization import Quantization, TensorFormat, format_of, is_router, stays_in_floats
from ..weights.small_floats import E2M1, E4M3, SmallFloatTensor
from ..weights.tensor import BlockTensor, DenseTensor, QuantizedTensor, WeightSource, WeightTensor, to_float32
from .load_plan import LoadPlan

logger = logging.getLogger(__name__)

Values = Literal["int4", "e2m1", "table4", "int8", "e4m3"]
IN_FOUR_BITS: tuple[Values, ...] = ("int4", "e2m1", "table4")

RUN = 64
"""Inputs whose codes of 4 bits lie together: byte i of 32 has input i in its low half, and input i + 32 in its high."""

_MIN_GROUP = 16
_PIECE = 1 << 22  # numbers that are unpacked at once
LOOKED_UP = ("embed.weight", "embed.per_layer")
_BY_INPUTS = (".o.weight", ".down.weight", ".latent_o.weight")  # what accelerators that share a model divide by inputs
_WHOLE_ROW = 1 << 30
_OF_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(.+)")


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


_BLOCKS: dict[BlockKind, Layout] = {
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


def layout_of(format: TensorFormat) -> Layout | None:
    """None: a format of floats."""
    if (block := format.block_kind) is not None:
        return _BLOCKS[block]
    group, zeros = format.group_size, format.zero_points
    if format.kind == "int8":
        return _BLOCKS["q8_0"]
    if format.kind == "int8-channel":
        return Layout("int8", _WHOLE_ROW, 4)
    if format.kind == "int4":
        return Layout("int4", group, 2 + zeros, float_bytes=4 + 4 * zeros)
    if format.kind == "grid":
        in_eight, scale = format.bits > 4, STORAGE[format.scales].itemsize
        floats = (2 if format.scales == "bfloat16" else 4) + 4 * zeros
        zero = (2 if in_eight else 1) * zeros
        return Layout("int8" if in_eight else "int4", group, scale + zero, float_bytes=floats)
    if format.kind == "nvfp4":
        return Layout("e2m1", group, 2, 4, _WHOLE_ROW)
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


def grouped_plan(
    spec: DecoderSpec,
    weights: WeightSource,
    dtype: DType,
    quantization: Quantization | None,
    *,
    num_parts: int = 1,
    in_floats: Collection[str] = (),
    bytes_of: Callable[[TensorFormat, tuple[int, ...]], int] = num_bytes,
) -> LoadPlan:
    """The plan of a device that keeps quantized matrices as GroupedMatrix, and all others in `dtype`.

    `num_parts` accelerators share the model. What they would divide within a group is dequantized, and so are the
    matrices of a layer's experts that would be one stack, if their formats differ, and what is named `in_floats`.
    `bytes_of` says what a weight needs.
    """
    shapes, formats, total = tensor_shapes(spec), dict[str, TensorFormat](), 0
    stacks: dict[str, set[TensorFormat]] = {}
    for name, shape in shapes.items():
        stored = weights.stored_format(name) if quantization is None and len(shape) == 2 else None
        format = format_of(name, shape, dtype, quantization, stored, len(spec.layers), tied=spec.head.tied)
        if name in in_floats or why_not_grouped(name, shape, format, num_parts) is not None:
            format = TensorFormat("float32" if is_router(name) else dtype)
        if len(shape) > 1:
            formats[name] = format
        if (stack := _stack_of(name)) is not None:
            stacks.setdefault(stack, set()).add(format)
    for name, shape in shapes.items():
        stack = _stack_of(name)
        if stack is not None and len(stacks[stack]) > 1 and len(shape) > 1:
            formats[name] = TensorFormat(dtype)
        total += bytes_of(formats.get(name, TensorFormat("float32")), shape)
    return LoadPlan(formats, total)


def why_not_grouped(name: str, shape: Sequence[int], format: TensorFormat, num_parts: int = 1) -> str | None:
    """In words, why accelerators do not keep a matrix in its quantized format; None: they do, or it has none."""
    layout = layout_of(format)
    if layout is None:
        return None
    if is_router(name):
        return "routers are kept in float32"
    if stays_in_floats(name):
        return "they are taken apart"
    if format.input_order is not None and name in LOOKED_UP:
        return "the inputs of an embedding cannot have an order of their own"
    inputs, group = shape[1], layout.group_size
    if format.kind == "int8" and inputs % group:
        return f"{inputs} inputs are no whole groups of {group}"
    if group < inputs and (group < _MIN_GROUP or group & (group - 1)):
        return f"groups are of 16, 32, 64 or another power of two of inputs, or whole rows, not of {group}"
    if num_parts > 1 and name.endswith(_BY_INPUTS):
        together = max(RUN, 1 if group >= inputs else group * (layout.run if layout.run < _WHOLE_ROW else 1))
        if format.input_order is not None or inputs // num_parts % together:
            return f"{num_parts} accelerators would divide them within a group"
    return None


def read_grouped(
    weights: WeightSource, formats: Mapping[str, TensorFormat], cancellation: Cancellation
) -> Iterator[tuple[str, DenseTensor | GroupedMatrix]]:
    """All weights in the `formats` of a plan, each checked when it is read. What is dequantized is logged.

    Raises what `read_finite` raises.
    """
    dequantized: Counter[str] = Counter()
    for name, tensor in read_finite(weights, cancellation):
        format = formats.get(name)
        stored = None if isinstance(tensor, DenseTensor) else tensor.stored_format
        if stored is not None and stored != format:
            reason = why_not_grouped(name, tensor_shape(tensor), stored)
            if reason is None and format is not None and layout_of(format) is not None:
                reason = "--quantization converts them"
            dequantized[reason or "accelerators would divide their groups, or use them in several ways"] += 1
        yield name, as_planned(tensor, format, cancellation)
    for reason, count in dequantized.items():
        logger.info("%d quantized matrices are dequantized as they are read: %s", count, reason)


def tensor_shape(tensor: WeightTensor | GroupedMatrix) -> tuple[int, ...]:
    """The logical shape of any weight."""
    return tensor.data.shape if isinstance(tensor, DenseTensor) else tensor.shape


def as_planned(
    tensor: WeightTensor, format: TensorFormat | None, cancellation: Cancellation
) -> DenseTensor | GroupedMatrix:
    """A weight in a format: its own, one that it is quantized to, or floats. Vectors have no format."""
    if not isinstance(tensor, DenseTensor):
        if tensor.stored_format == format:
            return grouped(tensor)
        tensor = DenseTensor(tensor.dequantize(), "float32", origin=tensor.origin)
    if format is None or layout_of(format) is None:
        return tensor
    block: BlockKind | None = "q8_0" if format.kind == "int8" else format.block_kind
    if block is None:
        return _in_pieces(tensor.data.shape, lambda rows: _rounded(_rows_of(tensor, rows), format))
    from ..weights.quantizing import quantize  # it loads the native library

    return grouped(quantize(tensor, block, threads=os.cpu_count() or 1, cancellation=cancellation))


def grouped(tensor: QuantizedTensor | BlockTensor | SmallFloatTensor) -> GroupedMatrix:
    """A quantized matrix of a checkpoint, with the same numbers. Its format is one that accelerators keep."""
    if isinstance(tensor, BlockTensor):
        return _in_pieces(tensor.shape, lambda rows: _of_blocks(tensor, rows))
    if isinstance(tensor, QuantizedTensor):
        return replace(
            _in_pieces(tensor.shape, lambda rows: _of_grid(tensor, rows)),
            input_order=None if tensor.input_order is None else np.ascontiguousarray(tensor.input_order, np.int32),
        )
    return _in_pieces(tensor.shape, lambda rows: _of_small_floats(tensor, rows))


def _stack_of(name: str) -> str | None:
    """What the matrices of a layer's experts have in common that are computed together."""
    found = _OF_EXPERT.fullmatch(name)
    return None if found is None else f"{found[1]}.{found[2]}"


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


def _in_pieces(shape: tuple[int, ...], make: Callable[[slice], GroupedMatrix]) -> GroupedMatrix:
    """The matrix of some rows at a time: what is made meanwhile has a byte or more for each number."""
    outputs, inputs = shape
    step = max(_PIECE // max(inputs, 1), 1)
    return joined([make(slice(start, start + step)) for start in range(0, max(outputs, 1), step)])


def _rows_of(tensor: DenseTensor, rows: slice) -> NDArray[np.float32]:
    return to_float32(DenseTensor(tensor.data[rows], tensor.dtype))


def _of_blocks(tensor: BlockTensor, rows: slice) -> GroupedMatrix:
    data = tensor.data[rows] if tensor.row_order is None else tensor.data[tensor.row_order[rows]]
    assert tensor.kind.parts is not None
    parts = tensor.kind.parts(np.ascontiguousarray(data).reshape(-1, tensor.kind.bytes))
    shape = len(data), tensor.shape[1]

    def by_row(array: NDArray[np.generic] | None) -> NDArray[np.generic] | None:
        return None if array is None else np.ascontiguousarray(array).reshape(shape[0], -1)

    layout = _BLOCKS[_block_kind(tensor)]
    codes, middle = parts.codes, 0
    if layout.values == "int8":
        codes = codes.astype(np.int8)  # what has no sign is below 32
    elif codes.dtype == np.int8:
        codes, middle = (codes + np.int8(8)).view(np.uint8), 8
    scales, table = parts.scales, parts.table
    if layout.values == "e2m1":  # of which the block's table has the double
        scales, table = bfloat16_bits(2 * np.asarray(scales, np.float32)), None
    matrix = np.asarray(codes).reshape(shape)
    return GroupedMatrix(
        layout.values,
        shape,
        layout.group_size,
        matrix if layout.values == "int8" else pack_runs(matrix.astype(np.uint8)),
        np.ascontiguousarray(scales).reshape(shape[0], -1),
        by_row(parts.factors),
        minima=by_row(parts.minima),
        minimum_factors=by_row(parts.minimum_factors),
        factor_run=parts.scales.shape[1],
        middle=middle,
        table=table,
    )


def _block_kind(tensor: BlockTensor) -> BlockKind:
    kind = tensor.stored_format.block_kind
    assert kind is not None
    return kind


def _of_grid(tensor: QuantizedTensor, rows: slice) -> GroupedMatrix:
    inputs, bits = tensor.shape[1], tensor.bits
    format, middle = tensor.stored_format, 1 << (bits - 1)
    codes = unpack(np.ascontiguousarray(tensor.codes[rows]), bits, inputs)
    signed = tensor.format == "int"
    if signed:
        codes = codes ^ np.uint8(middle)
    scales = np.ascontiguousarray(tensor.scales.data[rows], STORAGE[format.scales])
    # From here on codes have no sign, and zero points are such codes.
    zeros: NDArray[np.integer] | None = None
    if format.zero_points:
        points = np.zeros(scales.shape, np.int16) if tensor.zeros is None else tensor.zeros[rows].astype(np.int16)
        points = points + np.int16(middle if signed else 0)
        zeros = points - np.int16(middle) if bits == 8 else points.astype(np.int8)
    shape = len(codes), inputs
    if bits == 8:
        return GroupedMatrix(
            "int8", shape, format.group_size, (codes ^ np.uint8(middle)).view(np.int8), scales, zeros=zeros
        )
    middle = 0 if format.zero_points else middle
    return GroupedMatrix("int4", shape, format.group_size, pack_runs(codes), scales, zeros=zeros, middle=middle)


def _of_small_floats(tensor: SmallFloatTensor, rows: slice) -> GroupedMatrix:
    inputs, group = tensor.shape[1], min(tensor.group_size, tensor.shape[1])
    codes, scales = np.ascontiguousarray(tensor.codes[rows]), tensor.scales[rows]
    shape = len(codes), inputs
    if tensor.kind == "e4m3":
        return GroupedMatrix("e4m3", shape, group, codes, np.ascontiguousarray(scales, np.float32))
    if tensor.kind == "table4":
        nibbles = np.stack([codes >> 4, codes & 15], axis=-1).reshape(shape[0], -1)[:, :inputs]
        codes_of_scales = tensor.scale_codes
        if codes_of_scales is not None:
            largest, offsets = codes_of_scales.largest[rows], codes_of_scales.offsets[rows]
            scales = replace(codes_of_scales, largest=largest, offsets=offsets).scales(np.asarray(scales, np.uint8))
        floats = np.ascontiguousarray(scales, np.float32)
        return GroupedMatrix(
            "table4", shape, group, pack_runs(nibbles), floats, table=np.array(tensor.table, np.float32)
        )
    packed = pack_runs(unpack(codes, 4, inputs))
    if tensor.kind == "mxfp4":
        bits = bfloat16_bits(np.ldexp(np.float32(1), scales.astype(np.int32) - 127))
        return GroupedMatrix("e2m1", shape, group, packed, bits)
    assert tensor.divisors is not None
    factors = np.float32(1) / tensor.divisors[rows, np.newaxis].astype(np.float32)
    halves = E4M3[scales].astype(np.float16)
    return GroupedMatrix("e2m1", shape, group, packed, halves, factors, factor_run=scales.shape[1])


def _rounded(weights: NDArray[np.float32], format: TensorFormat) -> GroupedMatrix:
    """Weights `[N, K]`, each rounded to the nearest number of a format that has no blocks."""
    outputs, inputs = weights.shape
    layout = layout_of(format)
    assert layout is not None
    group = min(layout.group_size, inputs)
    padded = np.pad(weights, ((0, 0), (0, -inputs % group))).reshape(outputs, -1, group)
    if layout.values == "int4" and format.zero_points:
        least, most = np.minimum(padded.min(-1), 0), np.maximum(padded.max(-1), 0)
        scales = ((most - least) / 15).astype(np.float16)
        zeros = np.rint(_over(-least, scales))
        codes = np.clip(np.rint(_over(padded, scales[..., np.newaxis])) + zeros[..., np.newaxis], 0, 15)
        packed = pack_runs(codes.astype(np.uint8).reshape(outputs, -1)[:, :inputs])
        return GroupedMatrix("int4", (outputs, inputs), group, packed, scales, zeros=zeros.astype(np.int8))
    largest = np.abs(padded).max(-1)
    if layout.values == "int4":
        # The number that is furthest from 0 becomes -8, which has no positive counterpart.
        furthest = np.take_along_axis(padded, np.abs(padded).argmax(-1)[..., np.newaxis], -1)[..., 0]
        scales = (furthest / -8).astype(np.float16)
        codes = np.clip(np.rint(_over(padded, scales[..., np.newaxis])), -8, 7) + 8
        packed = pack_runs(codes.astype(np.uint8).reshape(outputs, -1)[:, :inputs])
        return GroupedMatrix("int4", (outputs, inputs), group, packed, scales, middle=8)
    most_of = 127 if layout.values == "int8" else E4M3[126]
    floats = (largest / most_of).astype(np.float32)
    quotients = _over(padded, floats[..., np.newaxis]).reshape(outputs, -1)[:, :inputs]
    codes = np.rint(quotients).astype(np.int8) if layout.values == "int8" else nearest_e4m3(quotients)
    return GroupedMatrix(layout.values, (outputs, inputs), group, np.ascontiguousarray(codes), floats)


def nearest_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The codes of the e4m3 floats nearest to values of at most 448, ties to even."""
    magnitudes = np.minimum(np.abs(values), E4M3[126]).astype(np.float32)
    bits = magnitudes.view(np.uint32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - np.uint32(120 << 3)  # 127 and 7 are the exponents' biases
    small = np.rint(magnitudes * np.float32(512)).astype(np.uint32)  # multiples of 2^-9, up to the first normal one
    codes = np.where(magnitudes < np.float32(2**-6), small, normal).astype(np.uint8)
    return np.asarray(codes | np.signbit(values).astype(np.uint8) << 7, np.uint8)


def _over(numbers: NDArray[np.float32], scales: NDArray[np.generic]) -> NDArray[np.float32]:
    """Quotients; 0 where the scale is 0."""
    divisors = scales.astype(np.float32)
    return np.divide(numbers, divisors, out=np.zeros_like(numbers), where=divisors != 0)


def _as_float32(array: NDArray[np.generic]) -> NDArray[np.float32]:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)
