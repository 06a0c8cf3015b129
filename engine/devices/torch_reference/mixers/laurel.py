"""LAuReL."""

from __future__ import annotations

from torch import Tensor

from ....models.spec import LaurelSpec
from .mixer import Parts, Tokens


class Laurel:
    """`x + norm(up(down(x)))`. It remembers nothing."""

    def __init__(self, spec: LaurelSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._weights = spec, layer, parts.weights

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The mixer's result, `[T, hidden]`."""
        between = self._weights.linear(f"{self._layer}.laurel_down", x)
        learned = self._weights.linear(f"{self._layer}.laurel_up", between)
        return x + self._weights.norm(f"{self._layer}.laurel_out_norm", self._spec.norm, learned)

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Nothing to copy."""

    def copy_state(self, source: int, target: int) -> None:
        """Nothing to copy."""
