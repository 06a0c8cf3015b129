"""LAuReL: a residual connection that learns (https://arxiv.org/abs/2411.07501)."""

from __future__ import annotations

from typing import ClassVar

from ...declaring.record import record
from .norm import NormSpec
from .shapes import Shapes, linear, under


@record(frozen=True, slots=True)
class LaurelSpec:
    """The mixer `x + norm(up(down(x)))`, with `rank` values between the matrices."""

    kind: ClassVar[str] = "laurel"

    rank: int
    norm: NormSpec

    @property
    def activations(self) -> int:
        """What is between the matrices."""
        return self.rank

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights: both matrices and the norm."""
        shapes = under("laurel_down", linear(self.rank, hidden_size, bias=False))
        shapes |= under("laurel_up", linear(hidden_size, self.rank, bias=False))
        return shapes | under("laurel_out_norm", self.norm.shapes(hidden_size))
