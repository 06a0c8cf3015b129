"""TensorRef: where a weight lies in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a weight lies in the checkpoint: `name`, transposed first if so said, then rows `[start, stop)` of it."""

    name: str
    transpose: bool = False
    rows: tuple[int, int] | None = None
