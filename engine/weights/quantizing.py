"""Floats to blocks of GGUF's types, with the native quantizer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidewheel import _native

from ..cancellation import Cancellation
from .block_types import KINDS, BlockKind
from .tensor import BlockTensor, DenseTensor

_PIECE = 1 << 25  # elements between two looks at whether loading was cancelled


def quantize(
    tensor: DenseTensor,
    kind: BlockKind,
    *,
    threads: int,
    importance: NDArray[np.float32] | None = None,
    thorough: bool = False,
    cancellation: Cancellation | None = None,
) -> BlockTensor:
    """A matrix `[N, K]` of floats in blocks of that type, with the least error that a search finds.

    `importance [K]` says how much an error of each input counts, as its mean square does. `thorough` takes longer for a
    little less error. The result is the same with any number of threads, on every processor. Raises ValueError for
    inputs that are no whole blocks and for numbers that are not finite, and LoadCancelledError.
    """
    block, data = KINDS[kind], tensor.data
    rows, inputs = data.shape
    blocks = np.empty((rows, inputs // block.elements * block.bytes), np.uint8)
    step = max(_PIECE // max(inputs, 1), 1)
    for start in range(0, rows, step):
        if cancellation is not None:
            cancellation.check()
        piece = data[start : start + step]
        piece = np.ascontiguousarray(piece, piece.dtype.newbyteorder("="))
        blocks[start : start + step] = _native.quantize(kind, piece, tensor.dtype, importance, threads, thorough)
    return BlockTensor(block, blocks)
