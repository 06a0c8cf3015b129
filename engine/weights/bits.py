"""Small integers packed in bytes: rows of one long bit string each, the first number in the lowest bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def unpack(rows: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """The first `count` numbers of each row, `[R, count]`, of bytes `[R, >= ceil(count * bits / 8)]`; `bits` <= 8."""
    if 8 % bits:
        singles = np.unpackbits(rows, axis=1, count=count * bits, bitorder="little").reshape(len(rows), count, bits)
        weights = (1 << np.arange(bits)).astype(np.uint8)
        return np.asarray(singles @ weights, np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = rows[..., np.newaxis] >> shifts & np.uint8((1 << bits) - 1)
    return numbers.reshape(len(rows), rows.shape[1] * len(shifts))[:, :count]


def pack(numbers: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The inverse of `unpack`: bytes `[R, ceil(C * bits / 8)]` of numbers `[R, C]`, which must be below 2**bits."""
    count = numbers.shape[1]
    if 8 % bits:
        singles = numbers[..., np.newaxis] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
        return np.packbits(singles.reshape(len(numbers), count * bits), axis=1, bitorder="little")
    each = 8 // bits
    packed = np.zeros((len(numbers), -(-count // each)), np.uint8)
    for i in range(min(each, count)):
        column = numbers[:, i::each]
        packed[:, : column.shape[1]] |= column << np.uint8(i * bits)
    return packed
