"""The tensors of one layer of a quantized checkpoint, each checked when it is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from ..dtypes import STORAGE
from ..quantization import TensorFormat
from ..small_floats import SmallFloatTensor
from ..stored import FLOATS, StoredMatrix, StoredTensor
from ..tensor import DenseTensor, QuantizedTensor, WeightTensor, to_float32

_NUMPY: dict[str, np.dtype[Any]] = {
    **{name: STORAGE[dtype].newbyteorder("<") for name, dtype in FLOATS.items()},
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "F8_E4M3": np.dtype("u1"),  # its bits
}


class LayerTensors:
    """The tensors of the layer `name` ("model.layers.0.mlp.up_proj"), by the last part of their names ("qweight").

    Those that were taken identify the layer's matrix. All methods raise ModelError, which names file and tensor.
    """

    def __init__(self, name: str, find: Callable[[str], StoredTensor | None]) -> None:
        self.name = name
        self._find = find
        self._taken: dict[str, StoredTensor] = {}
        self._path: Path | None = None  # a file that has some of them

    def find(self, part: str) -> StoredTensor | None:
        """The tensor `part` as it is stored, if there is one."""
        stored = self._find(f"{self.name}.{part}")
        if stored is not None:
            self._path = stored.path
        return stored

    def take(self, part: str, *dtypes: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """The tensor `part`. It must have one of the file's `dtypes`, and `shape`; None: it must be a matrix."""
        stored = self.find(part)
        if stored is None:
            raise self.error(part, "is missing, which the checkpoint's quantization needs")
        self._taken[part] = stored
        if stored.dtype not in dtypes:
            raise self.error(part, f"is stored as {stored.dtype}; supported are {', '.join(dtypes)}")
        if shape is None and (len(stored.shape) != 2 or 0 in stored.shape):
            raise self.error(part, f"has shape {stored.shape}, but must be a matrix")
        if shape is not None and stored.shape != shape:
            raise self.error(part, f"has shape {stored.shape}, but must have {shape}")
        return stored

    def array(self, part: str) -> NDArray[Any]:
        """The numbers of a tensor that was taken, little-endian; floats of 8 and bfloat16 as their bits."""
        stored = self._taken[part]
        return stored.array(_NUMPY[stored.dtype])[0]

    def floats(self, part: str) -> DenseTensor:
        """A tensor of floats that was taken."""
        return DenseTensor(self.array(part), FLOATS[self._taken[part].dtype], origin=self.origin(part))

    def scales(self, part: str) -> DenseTensor:
        """A tensor of scales that was taken. A scale of 0 makes its group 0; if all are, they were never written."""
        scales = self.floats(part)
        flat = scales.data.reshape(-1)
        if not any(to_float32(DenseTensor(some, scales.dtype)).any() for some in (flat[:64], flat)):
            raise self.only_zeros(part)
        return scales

    def only_zeros(self, part: str) -> ModelError:
        """The error for scales that are all 0."""
        return self.error(part, "has only zeros, which make the whole matrix 0: the file is not complete")

    def origin(self, part: str) -> str:
        """File and tensor."""
        stored = self._taken.get(part) or self.find(part)
        return f"{stored.path if stored else self._path or 'the checkpoint'}: tensor {self.name}.{part}"

    def error(self, part: str, words: str) -> ModelError:
        """An error about the tensor `part`, in these words."""
        return ModelError(f"{self.origin(part)} {words}")

    def matrix(self, shape: tuple[int, int], facts: object, read: Callable[[], WeightTensor]) -> StoredMatrix:
        """The matrix `[outputs, inputs]` of floats that `read` makes from the tensors that were taken and the config's
        `facts`.
        """
        return self._matrix(shape, facts, read, lambda: None)

    def small_floats(
        self,
        shape: tuple[int, int],
        facts: object,
        read: Callable[[], SmallFloatTensor],
        stored_format: Callable[[], TensorFormat],
    ) -> StoredMatrix:
        """The same of small floats, whose `stored_format` needs none of the codes and scales."""
        return self._matrix(shape, facts, read, stored_format)

    def integers(self, shape: tuple[int, int], facts: object, read: Callable[[bool], QuantizedTensor]) -> StoredMatrix:
        """The same of integers. `read(False)` leaves out the codes, which are all that is large: see `no_codes`."""
        return self._matrix(shape, facts, lambda: read(True), lambda: read(False).stored_format)

    def _matrix(
        self,
        shape: tuple[int, int],
        facts: object,
        read: Callable[[], WeightTensor],
        stored_format: Callable[[], TensorFormat | None],
    ) -> StoredMatrix:
        places = sorted((part, stored.place) for part, stored in self._taken.items())
        path = next(iter(self._taken.values())).path
        return StoredMatrix(path, shape, (repr(facts), *places), read, stored_format)
