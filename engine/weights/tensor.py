"""Weights as they lie in a checkpoint, and where they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .dtypes import DType


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """A weight as it lies in the checkpoint, often a read-only view of a memory map.

    `data` has the logical shape; its numpy dtype is float32, float16, or uint16 holding bfloat16 bits, as `dtype`
    says, in either byte order. It may be strided (transposed checkpoints). `mapped`: it is a view of a mapped file,
    whose pages may be given back to the system once they are copied, because they come back when they are read again.
    `origin` names its file and its name there; without one it was made, and needs no check.
    """

    data: NDArray[np.generic]
    dtype: DType
    mapped: bool = False
    origin: str | None = None


class WeightSource(Protocol):
    """All of a model's weights under Tidewheel's names (`tensor_shapes`), shapes already checked."""

    dtype: DType  # what most of the checkpoint is stored as; `--dtype auto` follows it
    # What tells these weights from all others, without reading them: equal for equal content only. None: not known.
    identity: str | None

    def __getitem__(self, name: str) -> WeightTensor: ...

    def __iter__(self) -> Iterator[str]: ...


def to_float32(tensor: WeightTensor) -> NDArray[np.float32]:
    """A contiguous, writable float32 copy of a weight; exact for every dtype."""
    if tensor.dtype == "bfloat16":
        return (tensor.data.astype(np.uint32, order="C") << 16).view(np.float32)
    return np.array(tensor.data, dtype=np.float32, order="C")
