"""A checkpoint's weights must be finite, because one NaN can spoil every answer.

Once weights are quantized nothing would show it: a NaN is rounded to some number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cancellation import Cancellation
from ..errors import ModelError
from .dtypes import DType
from .small_floats import SmallFloatTensor
from .tensor import DenseTensor, QuantizedTensor, WeightSource, WeightTensor

_PIECE = 1 << 22  # numbers that a thread looks at in one call
# The bits of infinity, without the sign. Larger ones are NaN.
_INFINITY: dict[DType | Literal["e4m3"], int] = {
    "float32": 0x7F80_0000,
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "e4m3": 0x7F,  # which has no infinity
}


class _Floats(NamedTuple):
    """What is looked through."""

    data: NDArray[np.generic]
    dtype: DType | Literal["e4m3"]
    origin: str | None


def require_finite(tensors: Sequence[WeightTensor], threads: int = 1) -> None:
    """Raises ModelError, naming the first tensor of a checkpoint that has infinite numbers or NaN. Reads all once.

    Only the scales of a quantized tensor are checked, because every code is a number.
    """
    floats = [part for tensor in tensors for part in _floats_of(tensor)]
    pieces = [(tensor, piece) for tensor in floats if tensor.origin is not None for piece in _pieces(tensor)]
    with ThreadPoolExecutor(threads) as pool:
        for (tensor, _), finite in zip(pieces, pool.map(_is_finite, pieces), strict=True):
            if not finite:
                pool.shutdown(cancel_futures=True)
                raise ModelError(f"{tensor.origin} has {_how_many(tensor)} not finite (infinite or NaN)")


def read_finite(weights: WeightSource, cancellation: Cancellation) -> Iterator[tuple[str, WeightTensor]]:
    """All weights, each checked when it is read. Raises as `require_finite` does, and LoadCancelledError."""
    for name in weights:
        cancellation.check()
        tensor = weights[name]
        require_finite([tensor])
        yield name, tensor


def _floats_of(tensor: WeightTensor) -> Iterator[_Floats]:
    if isinstance(tensor, DenseTensor):
        yield _Floats(tensor.data, tensor.dtype, tensor.origin)
    elif isinstance(tensor, QuantizedTensor):
        yield _Floats(tensor.scales.data, tensor.scales.dtype, tensor.scales.origin)
    elif isinstance(tensor, SmallFloatTensor):
        if tensor.kind == "e4m3":
            yield _Floats(tensor.codes, "e4m3", tensor.origin)
        yield _scales_of(tensor)
        if tensor.divisors is not None:
            yield _Floats(tensor.divisors, "float32", tensor.scales_origin)
    else:
        blocks = tensor.data.reshape(-1, tensor.kind.bytes)
        if tensor.kind.exponent:
            yield _exponents(blocks[:, 0], tensor.origin)
        for at in tensor.kind.halves:
            yield _Floats(blocks[:, at : at + 2].view("<f2")[:, 0], "float16", tensor.origin)


def _scales_of(tensor: SmallFloatTensor) -> _Floats:
    if tensor.kind == "mxfp4":
        return _exponents(tensor.scales, tensor.scales_origin)
    if tensor.scale_codes is not None:
        with np.errstate(over="ignore"):
            return _Floats(tensor.float_scales(), "float32", tensor.scales_origin)
    return _Floats(tensor.scales, "e4m3" if tensor.kind == "nvfp4" else "float32", tensor.scales_origin)


def _exponents(bytes: NDArray[np.generic], origin: str | None) -> _Floats:
    # 255 is not a number; as the exponent of a bfloat16 it is not finite either.
    return _Floats(bytes.astype(np.uint16) << 7, "bfloat16", origin)


def _is_finite(piece: tuple[_Floats, NDArray[np.generic]]) -> bool:
    # Two looks for the largest, and no copy: the largest bits are those of a positive one that is not finite if they
    # are read with a sign, and of a negative one without.
    tensor, numbers = piece
    infinity, size, order = _INFINITY[tensor.dtype], numbers.itemsize, numbers.dtype.byteorder
    signed, unsigned = (numbers.view(np.dtype(f"{kind}{size}").newbyteorder(order)) for kind in "iu")
    return bool(signed.max() < infinity and unsigned.max() < infinity | 1 << (8 * size - 1))


def _how_many(tensor: _Floats) -> str:
    infinity, size = _INFINITY[tensor.dtype], tensor.data.itemsize
    unsigned = np.dtype(f"u{size}").newbyteorder(tensor.data.dtype.byteorder)
    magnitudes = (piece.view(unsigned) & ((1 << (8 * size - 1)) - 1) for piece in _pieces(tensor))
    count = sum(int(np.count_nonzero(piece >= infinity)) for piece in magnitudes)
    return "1 value that is" if count == 1 else f"{count} values that are"


def _pieces(tensor: _Floats) -> Iterator[NDArray[np.generic]]:
    data = tensor.data.T if tensor.data.flags.f_contiguous else tensor.data
    flat = data.reshape(-1)
    for start in range(0, flat.size, _PIECE):
        yield flat[start : start + _PIECE]
