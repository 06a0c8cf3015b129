"""Taking the part of a stored tensor or matrix that a TensorRef names, and joining parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models.tensor_ref import TensorRef
from .block_types import BlockType
from .dtypes import STORAGE
from .quantization import TensorFormat
from .small_floats import SmallFloatTensor
from .stored import FLOATS, StoredMatrix, StoredTensor
from .tensor import BlockTensor, DenseTensor, QuantizedTensor, WeightTensor, to_float32

Part = tuple[StoredTensor | StoredMatrix, TensorRef]


def origin(stored: StoredTensor | StoredMatrix, ref: TensorRef) -> str:
    """File and tensor, for errors."""
    return f"{stored.path}: tensor {ref.name}"


def take(stored: StoredTensor | StoredMatrix, ref: TensorRef) -> WeightTensor:
    """What `ref` takes from it, without its stack. A quantized matrix cannot be transposed; its rows are its outputs.

    Transposed matrices of a stack are dense; if they were quantized, they are float32. Raises ModelError for a matrix
    whose tensors do not hold what they should.
    """
    if isinstance(stored, StoredMatrix):
        if ref.transpose_each is None:
            return _take_rows(stored.read(), ref)
        tensor = _take_rows(stored.read(), replace(ref, transpose_each=None))
        data = rows_of(to_float32(tensor), TensorRef(ref.name, transpose_each=ref.transpose_each))
        return DenseTensor(data, "float32", origin=tensor.origin)
    dtype = FLOATS[stored.dtype]
    whole, mapped = stored.array(STORAGE[dtype].newbyteorder("<"))
    one = whole if ref.index is None else whole[ref.index]
    data = rows_of(one.T if ref.transpose else one, ref)
    return DenseTensor(data, dtype, mapped and np.may_share_memory(data, whole), origin(stored, ref))


def format_of_parts(parts: Sequence[Part]) -> TensorFormat | None:
    """The format of a quantized matrix. None for floats, for parts that are not quantized in one way, and for what is
    computed of them.
    """
    formats = {
        stored.stored_format()
        if isinstance(stored, StoredMatrix) and not (ref.transpose_each or ref.minus_rows or ref.scaled_by)
        else None
        for stored, ref in parts
    }
    return formats.pop() if len(formats) == 1 else None


def join(parts: Sequence[WeightTensor]) -> WeightTensor:
    """One tensor with the rows of all. What is quantized in different ways, or in part, becomes float32."""
    if len(parts) == 1:
        return parts[0]
    origins = " + ".join(str(part.origin) for part in parts)
    quantized = [part for part in parts if isinstance(part, QuantizedTensor)]
    if len(quantized) == len(parts) and all(_alike(quantized[0], part) for part in quantized[1:]):
        return _join_quantized(quantized, origins)
    blocks = [part for part in parts if isinstance(part, BlockTensor) and part.row_order is None]
    if len(blocks) == len(parts) and len({part.kind.name for part in blocks}) == 1:
        return BlockTensor(blocks[0].kind, np.concatenate([part.data for part in blocks]), origin=origins)
    small = [part for part in parts if isinstance(part, SmallFloatTensor)]
    if len(small) == len(parts) and all(part.stored_format == small[0].stored_format for part in small[1:]):
        return _join_small_floats(small, origins)
    dense = [part for part in parts if isinstance(part, DenseTensor)]
    if len(dense) == len(parts) and len({part.dtype for part in dense}) == 1:
        return DenseTensor(np.concatenate([part.data for part in dense]), dense[0].dtype, origin=origins)
    return DenseTensor(np.concatenate([to_float32(part) for part in parts]), "float32", origin=origins)


def difference(tensor: WeightTensor, less: WeightTensor) -> DenseTensor:
    """The one less the other, which has its shape, in float32."""
    return DenseTensor(to_float32(tensor) - to_float32(less), "float32", origin=f"{tensor.origin} - {less.origin}")


def scaled(tensor: WeightTensor, factors: WeightTensor) -> DenseTensor:
    """The tensor with each row multiplied by the factor for it, in float32."""
    data = to_float32(tensor)
    by_row = to_float32(factors).reshape(-1, *[1] * (data.ndim - 1))
    return DenseTensor(data * by_row, "float32", origin=f"{tensor.origin} * {factors.origin}")


def rows_of(data: NDArray[Any], ref: TensorRef) -> NDArray[Any]:
    """What `ref` takes of an array that is transposed already; a view where that is possible."""
    if ref.each is not None:
        size, start, stop = ref.each
        groups = data.reshape(-1, size, *data.shape[1:])
        data = groups[:, start:stop].reshape(-1, *data.shape[1:])
    if ref.rows is not None:
        data = data[ref.rows[0] : ref.rows[1]]
    if ref.permute is not None:
        data = data[list(ref.permute)]
    if ref.columns is not None:
        data = data[:, list(ref.columns)]
    if ref.transpose_each is not None:
        rows, columns = ref.transpose_each
        data = data.reshape(-1, rows, columns).transpose(0, 2, 1).reshape(-1, rows)
    if ref.matrix:
        return data.reshape(len(data), -1)
    return data.reshape(-1) if ref.flat else data


def take_blocks(data: NDArray[np.uint8], kind: BlockType, ref: TensorRef, origin: str) -> BlockTensor:
    """What `ref` takes from rows of whole blocks, `data [..., bytes of a row]`, a view of a mapped file. It is not
    copied for `permute`.
    """
    rows = rows_of(data, replace(ref, permute=None))
    order = None if ref.permute is None else np.array(ref.permute, np.int32)
    return BlockTensor(kind, rows, np.may_share_memory(rows, data), order, origin)


def _take_rows(tensor: WeightTensor, ref: TensorRef) -> WeightTensor:
    if isinstance(tensor, DenseTensor):
        return replace(tensor, data=rows_of(tensor.data, ref))
    if isinstance(tensor, BlockTensor):
        taken = take_blocks(tensor.data, tensor.kind, ref, str(tensor.origin))
        return replace(taken, mapped=tensor.mapped and taken.mapped)
    codes = rows_of(tensor.codes, ref)
    if isinstance(tensor, SmallFloatTensor):
        return replace(
            tensor,
            shape=(len(codes), tensor.shape[1]),
            codes=codes,
            scales=rows_of(tensor.scales, ref),
            divisors=None if tensor.divisors is None else rows_of(tensor.divisors, ref),
            scale_codes=None
            if (scales := tensor.scale_codes) is None
            else replace(scales, largest=rows_of(scales.largest, ref), offsets=rows_of(scales.offsets, ref)),
            mapped=tensor.mapped and np.may_share_memory(codes, tensor.codes),
        )
    return replace(
        tensor,
        shape=(len(codes), tensor.shape[1]),
        codes=codes,
        scales=replace(tensor.scales, data=rows_of(tensor.scales.data, ref)),
        zeros=None if tensor.zeros is None else rows_of(tensor.zeros, ref),
    )


def _alike(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether their rows can follow each other in one tensor."""
    return (
        (a.format, a.bits, a.group_size, a.scales.dtype) == (b.format, b.bits, b.group_size, b.scales.dtype)
        and (a.zeros is None) == (b.zeros is None)
        and (a.input_order is None) == (b.input_order is None)
        and (a.input_order is None or b.input_order is None or np.array_equal(a.input_order, b.input_order))
    )


def _join_small_floats(parts: Sequence[SmallFloatTensor], origins: str) -> SmallFloatTensor:
    divisors = [part.divisors for part in parts if part.divisors is not None]
    codes = [part.scale_codes for part in parts if part.scale_codes is not None]
    return replace(
        parts[0],
        shape=(sum(part.shape[0] for part in parts), parts[0].shape[1]),
        codes=np.concatenate([part.codes for part in parts]),
        scales=np.concatenate([part.scales for part in parts]),
        divisors=np.concatenate(divisors) if divisors else None,
        scale_codes=replace(
            codes[0],
            largest=np.concatenate([part.largest for part in codes]),
            offsets=np.concatenate([part.offsets for part in codes]),
        )
        if codes
        else None,
        mapped=False,
        origin=origins,
        scales_origin=" + ".join(str(part.scales_origin) for part in parts),
    )


def _join_quantized(parts: Sequence[QuantizedTensor], origins: str) -> QuantizedTensor:
    first = parts[0]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    scales = DenseTensor(
        np.concatenate([part.scales.data for part in parts]),
        first.scales.dtype,
        origin=" + ".join(str(part.scales.origin) for part in parts),
    )
    return replace(
        first,
        shape=(sum(part.shape[0] for part in parts), first.shape[1]),
        codes=np.concatenate([part.codes for part in parts]),
        scales=scales,
        zeros=np.concatenate(zeros) if zeros else None,
        origin=origins,
    )
