"""Floats of 8 and 4 bits, and their scales (https://arxiv.org/abs/2209.05433, OCP Microscaling Formats v1.0)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..quantization import TensorFormat
from ..small_floats import MXFP4_GROUP, SmallFloatTensor
from ..stored import FLOATS, StoredMatrix
from ..tensor import to_float32
from .layer import LayerTensors


def mxfp4(packed: NDArray[np.uint8], exponents: NDArray[np.uint8], origin: str) -> SmallFloatTensor:
    """The matrix `[N, K]` of e2m1 in `packed [N, K / 2]`, with powers of two in `exponents [N, K / 32]`."""
    shape = (len(packed), 2 * packed.shape[1])
    return SmallFloatTensor(
        "mxfp4", shape, MXFP4_GROUP, packed, exponents, mapped=True, origin=origin, scales_origin=origin
    )


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


def e4m3_matrix(
    layer: LayerTensors, part: str, scale_part: str, shape: tuple[int, int], block: tuple[int, int], facts: object
) -> StoredMatrix:
    """The matrix of e4m3 in tensor `part`, times its scales, one for each block of outputs and inputs."""
    outputs, inputs = shape
    group = min(block[1], inputs)
    blocks = (-(-outputs // block[0]), -(-inputs // group))

    def read() -> SmallFloatTensor:
        scales = to_float32(layer.scales(scale_part)).reshape(blocks)
        rows = scales[np.arange(outputs) // block[0]]
        codes = layer.array(part)
        return SmallFloatTensor(
            "e4m3",
            shape,
            group,
            codes,
            rows,
            mapped=True,
            origin=layer.origin(part),
            scales_origin=layer.origin(scale_part),
        )

    return layer.small_floats(shape, facts, read, lambda: TensorFormat("e4m3", group))
