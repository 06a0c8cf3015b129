"""Random weights of a model's shape: to measure and to test without a checkpoint."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models.spec import DecoderSpec, tensor_shapes
from .dtypes import STORAGE, DType, bfloat16_bits
from .tensor import DenseTensor

_SCALE = 0.02
# A prime, so that no two rows of a matrix of up to this many rows are the same numbers.
_PERIOD = 1_048_583


class DummyWeights:
    """Normally distributed weights with deviation 0.02; norms are the identity. A function of `seed` and the names.

    There is one buffer of random numbers, as long as the largest tensor needs and repeating with a period. A tensor
    is a read-only view of it from a place that depends on the tensor's name, so that making a model costs next to
    nothing.
    """

    def __init__(self, spec: DecoderSpec, dtype: DType, seed: int = 0) -> None:
        self.dtype: DType = dtype
        self.identity: str | None = None  # making them again costs less than keeping them
        self._shapes = tensor_shapes(spec)
        self._seed = seed

    @functools.cached_property
    def _buffer(self) -> NDArray[Any]:
        # Made when the first tensor is asked for: by then it is known that the model fits into the memory.
        normals = np.random.default_rng(self._seed).standard_normal(_PERIOD, dtype=np.float32) * np.float32(_SCALE)
        largest = max(math.prod(shape) for shape in self._shapes.values())
        buffer = np.resize(_as_dtype(normals, self.dtype), _PERIOD + largest)
        buffer.flags.writeable = False
        return buffer

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __getitem__(self, name: str) -> DenseTensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            data = _as_dtype(np.ones(shape, np.float32), self.dtype)
        elif name.endswith("norm.bias"):
            data = np.zeros(shape, STORAGE[self.dtype])
        else:
            start = zlib.crc32(name.encode()) % _PERIOD
            data = self._buffer[start : start + math.prod(shape)].reshape(shape)
        return DenseTensor(data, self.dtype)


def _as_dtype(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    return bfloat16_bits(values) if dtype == "bfloat16" else values.astype(STORAGE[dtype])
