"""From an adapter's matrices A and B, as its file has them, to what they change in the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..weights.lora import LowRankUpdate
from .modules import Target


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """A tensor of an adapter's file. `read` gives all of it as float32; it may raise ModelError."""

    path: Path
    name: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[np.float32]]

    def floats(self) -> NDArray[np.float32]:
        """The content. Raises ModelError for values that are not finite."""
        values = self.read()
        if not np.isfinite(values).all():
            raise ModelError(f"{self.path}: {self.name} has values that are not finite")
        return values


def updates_of(
    targets: tuple[Target, ...],
    a: AdapterTensor,
    b: AdapterTensor,
    bias: AdapterTensor | None,
    scale: Callable[[int], float],
    max_rank: int,
) -> list[LowRankUpdate]:
    """The updates that `a [rank, inputs]`, `b [outputs, rank]` and `bias [outputs]` make. `scale` takes the rank.

    If the targets are in a stack of matrices, a and b have one more dimension in front, and there is no bias. Raises
    ModelError, naming file and tensor, for shapes that do not fit, or a rank above `max_rank`.
    """
    inputs, last = targets[0].inputs, targets[-1].ref.index
    stack = () if last is None else (last + 1,)
    dimensions = len(stack) + 2
    rank = a.shape[-2] if len(a.shape) == dimensions else 0
    fits = len(b.shape) == dimensions and all(target.fits(b.shape) for target in targets)
    if stack and fits:
        fits = b.shape[1] == outputs_of(targets)
    if not rank or a.shape != (*stack, rank, inputs) or not fits or b.shape != (*stack, b.shape[-2], rank):
        of = "".join(f"{count} experts, " for count in stack)
        raise ModelError(
            f"{a.path}: {a.name} {a.shape} and {b.name} {b.shape} do not fit the model: it needs A ({of}rank, "
            f"{inputs}) and B ({of}outputs, rank) with all outputs of that layer"
        )
    check_rank(a, rank, max_rank)
    if bias is not None and bias.shape != b.shape[:1]:
        raise ModelError(f"{a.path}: {bias.name} has shape {bias.shape}, not {b.shape[:1]}")
    values_a, values_b = a.floats(), b.floats()
    values_bias = None if bias is None else bias.floats()
    # By their place in a stack; parts of one matrix have one A.
    each_a, each_b = ([*values] if stack else [values] for values in (values_a, values_b))
    return [
        LowRankUpdate(
            target.name,
            target.columns(each_a[target.ref.index or 0]),
            target.rows(each_b[target.ref.index or 0]),
            scale(rank),
            None if values_bias is None else target.rows(values_bias),
            target.first_output,
        )
        for target in targets
    ]


def outputs_of(targets: tuple[Target, ...]) -> int:
    """How many outputs of one matrix of a stack the targets are."""
    return sum(target.outputs for target in targets if target.ref.index == targets[0].ref.index)


def check_rank(a: AdapterTensor, rank: int, max_rank: int) -> None:
    """Raises ModelError for a rank above `max_rank`."""
    if rank > max_rank:
        raise ModelError(f"{a.path}: {a.name} has rank {rank}, more than --max-lora-rank {max_rank}; raise that option")
