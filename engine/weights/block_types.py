"""The tensor types of GGUF files, and what their blocks mean as float32.

The layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. In the comments of the functions below, a
block has n bytes, and a field begins at byte `at`. All arithmetic is float32, in the order that the format's authors
use, so that every number equals theirs to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

BlockKind = Literal[
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"
]

_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]

_PIECE_ELEMENTS = 1 << 20  # made at once; what numpy needs meanwhile is a few times as large
# The values of 4-bit codes that are not evenly spaced.
_NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# Twice the values of e2m1 floats, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


class BlockParts(NamedTuple):
    """The numbers in blocks. A weight is `factor * scale * code - minimum_factor * minimum`, in float32.

    `codes [blocks, elements]` are integers, or indices of the `table [16] float32`, whose number takes the code's
    place. `scales` and `minima` are `[blocks, groups]`, for equal parts of a block, and their factors `[blocks, 1]`. A
    factor that is None is 1, and minima that are None are 0.
    """

    codes: NDArray[np.integer]
    scales: NDArray[np.generic]
    factors: NDArray[np.float16] | None = None
    minima: NDArray[np.generic] | None = None
    minimum_factors: NDArray[np.float16] | None = None
    table: _Floats | None = None

    def dequantize(self) -> _Floats:
        """The weights, `[blocks, elements]`."""
        codes = self.codes.astype(np.float32) if self.table is None else self.table[self.codes]
        values = _product(self.scales, self.factors)[..., np.newaxis] * codes.reshape(*self.scales.shape, -1)
        if self.minima is not None:
            values -= _product(self.minima, self.minimum_factors)[..., np.newaxis]
        return values.reshape(self.codes.shape)


class BlockType(NamedTuple):
    """A tensor type: a block of `elements` elements takes `bytes` bytes.

    `parts` takes `[blocks, bytes] uint8` apart. It is None for plain floats. `halves` says at which bytes of a block
    its float16 numbers begin, `exponent` that its first byte is a power of two (e8m0).
    """

    name: str
    elements: int
    bytes: int
    parts: Callable[[_Bytes], BlockParts] | None = None
    halves: tuple[int, ...] = ()
    exponent: bool = False


def dequantize(data: _Bytes, kind: BlockType) -> _Floats:
    """The elements of whole blocks, one after the other, in a new array. Raises ValueError for plain floats."""
    if kind.parts is None:
        raise ValueError(f"{kind.name} has no blocks")
    blocks = data.reshape(-1, kind.bytes)
    values = np.empty((len(blocks), kind.elements), np.float32)
    step = max(_PIECE_ELEMENTS // kind.elements, 1)
    with np.errstate(all="ignore"):  # scales that are not finite are found in the result
        for start in range(0, len(blocks), step):
            values[start : start + step] = kind.parts(blocks[start : start + step]).dequantize()
    return values.reshape(-1)


def _product(numbers: NDArray[np.generic], factors: NDArray[np.float16] | None) -> _Floats:
    floats = numbers.astype(np.float32)
    return floats if factors is None else factors.astype(np.float32) * floats


def _half(blocks: _Bytes, at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float16)


def _fields(data: _Bytes, groups: int, bits: int) -> _Bytes:
    """The fields of bytes in groups: first the lowest bits of all bytes of a group, then the next bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, np.newaxis]
    fields = data.reshape(len(data), groups, 1, -1) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(data), -1)


def _bits(data: _Bytes) -> _Bytes:
    return np.unpackbits(data, axis=1, bitorder="little")


def _less(codes: NDArray[np.integer], middle: int) -> NDArray[np.int8]:
    return codes.astype(np.int8) - np.int8(middle)


def _q4_0(b: _Bytes) -> BlockParts:
    return BlockParts(_less(_fields(b[:, 2:], 1, 4), 8), _half(b, 0))


def _q4_1(b: _Bytes) -> BlockParts:
    return BlockParts(_fields(b[:, 4:], 1, 4), _half(b, 0), minima=-_half(b, 2))


def _q5_0(b: _Bytes) -> BlockParts:
    return BlockParts(_less(_fields(b[:, 6:], 1, 4) | _bits(b[:, 2:6]) << 4, 16), _half(b, 0))


def _q5_1(b: _Bytes) -> BlockParts:
    return BlockParts(_fields(b[:, 8:], 1, 4) | _bits(b[:, 4:8]) << 4, _half(b, 0), minima=-_half(b, 2))


def _q8_0(b: _Bytes) -> BlockParts:
    return BlockParts(b[:, 2:].view(np.int8), _half(b, 0))


def _q2_k(b: _Bytes) -> BlockParts:
    codes = _fields(b[:, 16:80], 2, 2)
    return BlockParts(codes, b[:, :16] & 15, _half(b, 80), b[:, :16] >> 4, _half(b, 82))


def _q3_k(b: _Bytes) -> BlockParts:
    scales = _fields(b[:, 96:104], 1, 4) | _fields(b[:, 104:108], 1, 2) << 4
    codes = _fields(b[:, 32:96], 2, 2) | _fields(b[:, :32], 1, 1) << 2
    return BlockParts(_less(codes, 4), _less(scales, 32), _half(b, 108))


def _with_minima(b: _Bytes, codes: NDArray[np.integer]) -> BlockParts:
    """Of Q4_K and Q5_K: 8 scales and 8 minima of 6 bits in 12 bytes. The last 4 bytes hold the rest of 8 numbers."""
    first, second, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=1)
    return BlockParts(codes, scales, _half(b, 0), minima, _half(b, 2))


def _q4_k(b: _Bytes) -> BlockParts:
    return _with_minima(b, _fields(b[:, 16:], 4, 4))


def _q5_k(b: _Bytes) -> BlockParts:
    return _with_minima(b, _fields(b[:, 48:], 4, 4) | _fields(b[:, 16:48], 1, 1) << 4)


def _q6_k(b: _Bytes) -> BlockParts:
    codes = _fields(b[:, :128], 2, 4) | _fields(b[:, 128:192], 2, 2) << 4
    return BlockParts(_less(codes, 32), b[:, 192:208].view(np.int8), _half(b, 208))


def _iq4_nl(b: _Bytes) -> BlockParts:
    return BlockParts(_fields(b[:, 2:], 1, 4), _half(b, 0), table=_NONLINEAR)


def _iq4_xs(b: _Bytes) -> BlockParts:
    # Two bits for each of 8 scales in 2 bytes, and four bits in 4: each byte's first scale lies in its lowest bits.
    high = (b[:, 2:4, np.newaxis] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(-1, 8)
    low = (b[:, 4:8, np.newaxis] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    return BlockParts(_fields(b[:, 8:], 8, 4), _less(low | high << 4, 32), _half(b, 0), table=_NONLINEAR)


def _mxfp4(b: _Bytes) -> BlockParts:
    scales = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    return BlockParts(_fields(b[:, 1:], 1, 4), scales, table=_TWICE_E2M1)


BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18, _q4_0, (0,)),
    3: BlockType("Q4_1", 32, 20, _q4_1, (0, 2)),
    6: BlockType("Q5_0", 32, 22, _q5_0, (0,)),
    7: BlockType("Q5_1", 32, 24, _q5_1, (0, 2)),
    8: BlockType("Q8_0", 32, 34, _q8_0, (0,)),
    10: BlockType("Q2_K", 256, 84, _q2_k, (80, 82)),
    11: BlockType("Q3_K", 256, 110, _q3_k, (108,)),
    12: BlockType("Q4_K", 256, 144, _q4_k, (0, 2)),
    13: BlockType("Q5_K", 256, 176, _q5_k, (0, 2)),
    14: BlockType("Q6_K", 256, 210, _q6_k, (208,)),
    20: BlockType("IQ4_NL", 32, 18, _iq4_nl, (0,)),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs, (0,)),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17, _mxfp4, exponent=True),
}

KINDS: dict[BlockKind, BlockType] = {
    kind: block for block in BLOCK_TYPES.values() for kind in get_args(BlockKind) if kind == block.name.lower()
}
"""The types that have blocks."""

# Types that are refused, so that the error can name them.
OTHER_TYPES: dict[int, str] = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4",
    32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
