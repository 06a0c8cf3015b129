"""The contents of a checkpoint's files, before they get a model's names: tensors, and matrices of several tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..errors import ModelError
from .dtypes import STORAGE, DType
from .quantization import TensorFormat
from .tensor import DenseTensor, WeightTensor

FLOATS: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The dtypes of weights that are not quantized, by the file's words for them."""


class StoredTensor(Struct, frozen=True):
    """A tensor as a file holds it. `dtype` is the file's word for it (F32, BF16, I32, ...); `data` its bytes."""

    path: Path
    version: tuple[str, int, int, int]  # of the file: its path, bytes, last change of content and of inode in ns
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]  # a read-only view of the mapped file, from byte `start` on
    start: int

    @property
    def place(self) -> tuple[Any, ...]:
        """An identity of its content, without reading it."""
        return (*self.version, self.start, self.dtype, self.shape)

    def array(self, dtype: np.dtype[Any]) -> tuple[NDArray[Any], bool]:
        """Its numbers, of a little-endian dtype of the right size, and whether they are a view of the mapped file.

        They are copied where they lie at an odd place, as they do if a file's header has an odd length.
        """
        mapped = self.data.ctypes.data % dtype.itemsize == 0
        numbers = (self.data if mapped else self.data.copy()).view(dtype)
        return numbers.reshape(self.shape), mapped

    def floats(self, name: str) -> DenseTensor:
        """Its floats. Raises ModelError, naming the file and `name`, if it is of another type."""
        dtype = FLOATS.get(self.dtype)
        if dtype is None:
            raise ModelError(f"{self.path}: {name} is stored as {self.dtype}; supported are {', '.join(FLOATS)}")
        data, mapped = self.array(STORAGE[dtype].newbyteorder("<"))
        return DenseTensor(data, dtype, mapped, f"{self.path}: tensor {name}")


class StoredMatrix(Struct, frozen=True):
    """A matrix `[outputs, inputs]` of `shape` that a quantized checkpoint stores in several tensors.

    Names, types and shapes of the tensors are checked. `read` and `stored_format` check what they hold: they raise
    ModelError. `stored_format` reads little; it is None if only floats can be made of the matrix.
    """

    path: Path
    shape: tuple[int, int]
    place: tuple[Any, ...]  # what identifies its content, without reading it
    read: Callable[[], WeightTensor]
    stored_format: Callable[[], TensorFormat | None]


Checkpoint = dict[str, StoredTensor]
"""Tensors by their names."""
Stored = Mapping[str, StoredTensor | StoredMatrix]
"""One whose matrices may be quantized."""
