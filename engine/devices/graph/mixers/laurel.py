"""LAuReL."""

from __future__ import annotations

from torch import Tensor

from ....models.spec import LaurelSpec
from .mixer import Parts, Tokens


class Laurel:
    """`x + norm(up(down(x)))`. It remembers nothing."""

    def __init__(self, spec: LaurelSpec, layer: str, parts: Parts) -> None:
        weights = parts.weights
        self._down, self._up = weights.linear(f"{layer}.laurel_down"), weights.linear(f"{layer}.laurel_up")
        self._norm = weights.norm(f"{layer}.laurel_out_norm", spec.norm)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The mixer's result, `[S, Q, hidden]`."""
        return x + self._norm(self._up(self._down(x)))
