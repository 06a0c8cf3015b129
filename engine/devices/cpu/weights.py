"""The way of weights from a checkpoint into the native runtime."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection

import numpy as np

from tidewheel import _native

from ...cancellation import Cancellation
from ...weights.bits import pack, unpack
from ...weights.block_types import BlockKind
from ...weights.dtypes import STORAGE
from ...weights.finite import require_finite
from ...weights.quantization import TensorFormat
from ...weights.quantizing import quantize
from ...weights.small_floats import SmallFloatTensor
from ...weights.tensor import BlockTensor, DenseTensor, QuantizedTensor, WeightSource, WeightTensor
from .formats import Formats, grid_group, interleaved_with, small_float_group, why_not_kept

logger = logging.getLogger(__name__)

_BYTES_TOGETHER = 1 << 28  # of a mapped checkpoint: packed in one call of the runtime


def set_weights(
    native: _native.Executor | _native.Tower,
    weights: WeightSource,
    formats: Formats,
    threads: int,
    cancellation: Cancellation,
    unpacked: frozenset[str] = frozenset(),
    *,
    without: Collection[str] = (),
) -> None:
    """Pack all weights with `threads` threads. A quantized matrix whose format is not the checkpoint's is dequantized,
    which is logged with the reason, and what is to be in blocks is quantized. Those that stay `unpacked` are only
    looked through. Those that are named in `without` are not read.

    Raises LoadCancelledError between two of the runtime's calls, and what `require_finite` raises.
    """
    # Mapped tensors are packed many at a time, because each return from the runtime waits for the interpreter's lock.
    # Their pages are given back to the system as they are packed. A tensor that is not mapped may have been made just
    # now, so it is packed at once. Memory thus holds the packed model and only the tensors that are being packed.
    together: dict[str, WeightTensor] = {}
    num_bytes = 0
    dequantized: Counter[str] = Counter()
    copied = 0
    for name in weights:
        if name in without:
            continue
        tensor = weights[name]
        format = formats.get(name)
        to_blocks = _block_kind(tensor, format)
        if not isinstance(tensor, DenseTensor) and (to_blocks or format is None or not format.is_stored):
            dequantized[_reason(name, weights, tensor)] += 1
            require_finite([tensor])  # so that the error names the scales
            tensor = DenseTensor(tensor.dequantize(), "float32", origin=tensor.origin)
        if to_blocks is not None and isinstance(tensor, DenseTensor):
            require_finite([tensor], threads)
            tensor = quantize(tensor, to_blocks, threads=threads, cancellation=cancellation)
        together[name] = tensor
        copied += name in unpacked and (isinstance(tensor, QuantizedTensor) or not tensor.mapped)
        num_bytes += _num_bytes(tensor)
        if num_bytes >= _BYTES_TOGETHER or isinstance(tensor, QuantizedTensor) or not tensor.mapped:
            cancellation.check()
            _pack(native, together, threads)
            together, num_bytes = {}, 0
    _pack(native, together, threads)
    if copied:
        logger.info(
            "%d matrices of experts are kept in memory as they were read, because they are not a part of a file", copied
        )
    for reason, count in dequantized.items():
        logger.info("%d quantized matrices are dequantized as they are read: %s", count, reason)


def _block_kind(tensor: WeightTensor, format: TensorFormat | None) -> BlockKind | None:
    """The type of blocks that a tensor is quantized to; None: its format has no blocks, or it has that type already."""
    if format is None or (not isinstance(tensor, DenseTensor) and tensor.stored_format == format):
        return None
    return format.block_kind


def _reason(name: str, weights: WeightSource, tensor: QuantizedTensor | BlockTensor | SmallFloatTensor) -> str:
    stored = weights.stored_format(name)
    if stored is None:
        return "their parts are stored in different ways"
    if reason := why_not_kept(name, tensor.shape, stored):
        return reason
    pair = interleaved_with(name)
    if pair is not None and pair in weights and weights.stored_format(pair) != stored:
        return "gate and up of an expert are stored in different ways"
    return "--quantization or --embedding-dtype converts them"


def _num_bytes(tensor: WeightTensor) -> int:
    return tensor.data.nbytes if isinstance(tensor, DenseTensor | BlockTensor) else tensor.codes.nbytes


def _pack(native: _native.Executor | _native.Tower, tensors: dict[str, WeightTensor], threads: int) -> None:
    # The runtime looks through floats and blocks while it packs them.
    others = [tensor for tensor in tensors.values() if not isinstance(tensor, DenseTensor | BlockTensor)]
    require_finite(others, threads)
    floats, matrices = [], []
    for name, tensor in tensors.items():
        if isinstance(tensor, BlockTensor):
            kind = tensor.kind
            scales_at = [(half + 1, 0x7C) for half in kind.halves] + [(0, 0xFF)] * kind.exponent
            order, mapped = tensor.row_order, tensor.mapped
            matrices.append(_native.BlockSource(name, tensor.data, kind.name.lower(), order, mapped, scales_at))
        elif isinstance(tensor, QuantizedTensor):
            matrices.append(_grid(name, tensor))
        elif isinstance(tensor, SmallFloatTensor):
            matrices.append(_small_floats(name, tensor))
        else:
            data, swapped = tensor.data, not tensor.data.dtype.isnative
            if swapped:
                data = data.view(data.dtype.newbyteorder())  # the same bytes; they are swapped as they are packed
            floats.append((name, data, tensor.dtype, swapped, tensor.mapped))
    if not native.set_weights(floats, matrices):
        require_finite(list(tensors.values()), threads)  # which names the first tensor and says how many


def _small_floats(name: str, tensor: SmallFloatTensor) -> _native.BlockSource:
    inputs = tensor.shape[1]
    in_bytes, codes = tensor.scales.dtype == np.uint8, tensor.scale_codes
    group = (
        tensor.group_size
        if tensor.kind in ("nvfp4", "mxfp4")
        else small_float_group(tensor.stored_format.group_size, inputs)
    )
    if group is None:
        raise ValueError(f"{name} is stored in {tensor.stored_format}, for which there are no kernels")
    numbers = tensor.divisors if tensor.table is None else tensor.table
    return _native.BlockSource(
        name,
        tensor.codes,
        "mxfp4-rows" if tensor.kind == "mxfp4" else tensor.kind,
        group,
        inputs,
        np.ascontiguousarray(tensor.scales, np.uint8 if in_bytes else np.float32),
        None if numbers is None else np.ascontiguousarray(numbers, np.float32),
        () if codes is None else codes.table,
        None if codes is None else np.ascontiguousarray(codes.largest),
        None if codes is None else np.ascontiguousarray(codes.offsets),
        tensor.mapped,
    )


def _grid(name: str, tensor: QuantizedTensor) -> _native.BlockSource:
    format, inputs = tensor.stored_format, tensor.shape[1]
    group = grid_group(format.group_size, inputs)
    if group is None:
        raise ValueError(f"{name} is stored in {format}, for which there are no kernels")
    codes, signed, zeros = tensor.codes, tensor.format == "int", None
    if format.zero_points:
        points = np.zeros(tensor.scales.data.shape, np.int64) if tensor.zeros is None else tensor.zeros.astype(np.int64)
        if signed:  # zero points go with unsigned codes
            middle = 1 << (tensor.bits - 1)
            codes = pack(unpack(codes, tensor.bits, inputs) ^ np.uint8(middle), tensor.bits)
            signed, points = False, points + middle
        zeros = np.ascontiguousarray(points, np.uint8)
    scales = np.ascontiguousarray(tensor.scales.data, STORAGE[tensor.scales.dtype])
    return _native.BlockSource(
        name, np.ascontiguousarray(codes), tensor.bits, group, inputs, scales, tensor.scales.dtype, zeros, signed
    )
