"""How each quantized matrix of a checkpoint, and one in floats, becomes a GroupedMatrix."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..cancellation import Cancellation
from ..weights.bits import unpack
from ..weights.block_types import BlockKind
from ..weights.dtypes import STORAGE, bfloat16_bits
from ..weights.quantization import TensorFormat
from ..weights.small_floats import E4M3, SmallFloatTensor
from ..weights.tensor import BlockTensor, DenseTensor, QuantizedTensor, WeightTensor, to_float32
from .grouped_weights import BLOCKS, GroupedMatrix, joined, layout_of, pack_runs

_PIECE = 1 << 22  # numbers that are unpacked at once


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

    layout = BLOCKS[_block_kind(tensor)]
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
