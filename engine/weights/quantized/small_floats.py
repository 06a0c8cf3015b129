"""Floats of 8 and 4 bits, and their scales (https://arxiv.org/abs/2209.05433, OCP Microscaling Formats v1.0)."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from ..bits import unpack
from ..block_types import BLOCK_TYPES
from ..stored import FLOATS
from ..tensor import BlockTensor, DenseTensor, to_float32
from .layer import LayerTensors

logger = logging.getLogger(__name__)


def _e4m3_values() -> NDArray[np.float32]:
    bits = np.arange(128)
    exponent, mantissa = bits >> 3, bits & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[127] = np.nan  # there is no infinity
    return np.concatenate([values, -values]).astype(np.float32)


E4M3 = _e4m3_values()
"""What each of the 256 codes of e4m3 (without infinities) means."""

MXFP4 = next(kind for kind in BLOCK_TYPES.values() if kind.name == "MXFP4")
"""GGUF's blocks of 32 numbers of e2m1 with one power of two."""

_E8M0 = np.array([*(2.0 ** (code - 127) for code in range(255)), np.nan], np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_SIGNED = np.concatenate([_E2M1, -_E2M1])


def e2m1(packed: NDArray[np.uint8], inputs: int) -> NDArray[np.float32]:
    """`[N, K]` floats of 4 bits, of bytes `[N, K / 2]`, the first in the low nibble."""
    return np.asarray(_E2M1_SIGNED[unpack(packed, 4, inputs)])


def e8m0(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Powers of two, of their exponents with a bias of 127. 255 is not a number."""
    return np.asarray(_E8M0[codes])


def mxfp4_blocks(packed: NDArray[np.uint8], exponents: NDArray[np.uint8], origin: str) -> BlockTensor:
    """The matrix `[N, K]` of e2m1, in `packed [N, K / 2]` as `e2m1` reads it, whose groups of 32 inputs are times 2 to
    the power of `exponents [N, K / 32]`.

    The numbers are the same in GGUF's blocks, which have element j and element j + 16 in one byte.
    """
    pairs = packed.reshape(*exponents.shape, 16)
    first, second = pairs[..., :8], pairs[..., 8:]
    blocks = np.empty((*exponents.shape, MXFP4.bytes), np.uint8)
    blocks[..., 0] = exponents
    blocks[..., 1::2] = first & 15 | second << 4
    blocks[..., 2::2] = first >> 4 | second & 240
    return BlockTensor(MXFP4, blocks.reshape(len(blocks), -1), origin=origin)


def scaled(
    values: NDArray[np.float32], scales: NDArray[np.float32], block: tuple[int, int], origin: str
) -> DenseTensor:
    """`values [N, K]`, changed in place: each times the scale of its block of `block` outputs and inputs."""
    width = min(block[1], values.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found as in every other weight
        for row in range(len(scales)):  # without a matrix of scales as large as that of values
            rows = values[row * block[0] : (row + 1) * block[0]]
            rows *= np.repeat(scales[row], width)[: values.shape[1]]
    return DenseTensor(values, "float32", origin=origin)


def take_scales(
    layer: LayerTensors, part: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> tuple[int, int]:
    """Take the scales of a matrix of that shape, and say what block of outputs and inputs has one.

    Without `block` there is one scale in all or one an output. Raises ModelError for another number of scales.
    """
    if block is None:
        found = layer.find(part)
        if found is not None and found.shape in ((), (1,), (1, 1)):
            layer.take(part, *FLOATS, shape=found.shape)
            return shape
        per_row = (shape[0],) if found is not None and len(found.shape) == 1 else (shape[0], 1)
        layer.take(part, *FLOATS, shape=per_row)
        return (1, shape[1])
    layer.take(part, *FLOATS, shape=(-(-shape[0] // block[0]), -(-shape[1] // block[1])))
    return block


def read_e4m3(
    layer: LayerTensors, part: str, scale_part: str, shape: tuple[int, int], block: tuple[int, int]
) -> DenseTensor:
    """The matrix of e4m3 in tensor `part`, times its scales, one for each block of outputs and inputs."""
    scales = to_float32(layer.scales(scale_part)).reshape(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return scaled(E4M3[layer.array(part)], scales, block, layer.origin(part))


def say_that_memory_grows(method: str) -> None:
    """Log that such weights do not stay as small as they are in the file."""
    logger.info(
        "The checkpoint's small floats (%s) are dequantized as they are read: they take the memory of --dtype or "
        "--quantization, not of the file",
        method,
    )
