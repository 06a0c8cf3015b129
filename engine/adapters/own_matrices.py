"""Embeddings and heads that adapters have of their own, instead of the model's."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..errors import ModelError
from ..weights.finite import require_finite
from ..weights.lora import LowRankUpdate
from ..weights.stored import StoredTensor
from ..weights.tensor import DenseTensor, WeightTensor, to_float32

_PIECE = 1 << 12  # rows that are compared at a time


def own_matrix(name: str, stored: StoredTensor, shape: tuple[int, ...]) -> DenseTensor:
    """The matrix, a view of the file where that is possible. Raises ModelError, naming file and tensor, for another
    shape or type than the model's, and for numbers that are not finite.
    """
    if stored.shape != shape:
        raise ModelError(
            f"{stored.path}: {name} has shape {stored.shape}, but the model's is {shape}: adapters cannot add tokens"
        )
    matrix = stored.floats(name)
    require_finite([matrix])
    return matrix


def equals_base(matrix: DenseTensor, base: WeightTensor) -> bool:
    """Whether a matrix is the model's own to the bit."""
    if not isinstance(base, DenseTensor):
        return False
    for start in range(0, len(matrix.data), _PIECE):
        own, of_base = (
            to_float32(DenseTensor(one.data[start : start + _PIECE], one.dtype)).view(np.uint32)
            for one in (matrix, base)
        )
        if not np.array_equal(own, of_base):
            return False
    return True


def merged(matrix: DenseTensor, updates: Iterable[LowRankUpdate]) -> DenseTensor:
    """The matrix and what is added to its product, in float32. Raises ModelError for biases."""
    sum_ = to_float32(matrix)
    for update in updates:
        if update.bias is not None or update.shift is not None:
            raise ModelError(
                f"{matrix.origin}: a head of an adapter's own has no bias; train with lora_bias=False and bias='none', "
                "or merge the adapter into its model"
            )
        sum_ += update.scale * (update.b @ update.a)
    return DenseTensor(sum_, "float32", origin=matrix.origin)
