"""LoraAdapter: an adapter as plain data, under the names of the model's own matrices."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class LowRankUpdate:
    """What is added to some outputs of a matrix: `scale * (b a x + bias)`, https://arxiv.org/abs/2106.09685.

    `name` is the matrix' module in Tidewheel's words (`layers.0.q`); the update is of its outputs from `first_output`
    on. `a` is `[rank, inputs]`, `b` `[outputs, rank]`, `bias` `[outputs]` or None; all are contiguous float32. Updates
    of parts of one matrix in a checkpoint have the same object `a`.
    """

    name: str
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float
    bias: NDArray[np.float32] | None = None
    first_output: int = 0

    @property
    def rank(self) -> int:
        """The values between the two matrices."""
        return len(self.a)


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """All updates of an adapter. Adapters with the same `digest` compute the same."""

    updates: tuple[LowRankUpdate, ...]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        content = hashlib.sha256()
        for update in self.updates:
            shapes = (update.name, update.first_output, update.scale, update.a.shape, update.b.shape)
            content.update(repr((*shapes, update.bias is not None)).encode())
            for array in (update.a, update.b, update.bias):
                if array is not None:
                    content.update(array.data)
        object.__setattr__(self, "digest", content.hexdigest())

    @property
    def rank(self) -> int:
        """The highest of an update."""
        return max(update.rank for update in self.updates)
