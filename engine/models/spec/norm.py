"""Norms."""

from __future__ import annotations

from typing import Literal

from ...declaring.record import record
from .shapes import Shapes


@record(frozen=True, slots=True)
class NormSpec:
    """RMSNorm (https://arxiv.org/abs/1910.07467) or LayerNorm (https://arxiv.org/abs/1607.06450).

    With a `unit_offset` the checkpoint holds what the weight is above 1, as Gemma's do. Without a `weight` values are
    normalized and not scaled.
    """

    kind: Literal["rms", "layer"]
    eps: float
    bias: bool = False
    weight: bool = True
    unit_offset: bool = False

    def __post_init__(self) -> None:
        if not self.weight and (self.bias or self.unit_offset):
            raise ValueError("a norm without a weight has neither a bias nor an offset")

    def shapes(self, size: int) -> Shapes:
        """The weights of a norm over `size` values."""
        shapes: Shapes = {"weight": (size,)} if self.weight else {}
        if self.bias:
            shapes["bias"] = (size,)
        return shapes
