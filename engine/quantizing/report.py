"""What became of each tensor of a model that was quantized."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def relative_error(lost: float, whole: float) -> float:
    """The root of a squared error over that of the square of what was rounded; 0 if that is 0."""
    return math.sqrt(lost / whole) if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor of the file or folder that was written.

    `format` is how it is stored (`Q4_K`, `int4 in groups of 128`, `BF16`). `error` is the root of the mean squared
    error of its weights, relative to the root of their mean square; with a calibration text, that of its outputs
    instead, as far as the statistics of inputs tell. None: it was copied. `note` says why it was not quantized, or that
    the text says nothing about it.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    num_bytes: int
    error: float | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """All tensors, in the order of the files, and what they take there."""

    tensors: Sequence[TensorReport]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)
