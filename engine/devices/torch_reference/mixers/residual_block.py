"""Residual blocks: mixers and the norms around them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....models.spec import ResidualBlockSpec
from .mixer import Parts, Tokens


class ResidualBlock:
    """`x = sum_scale * sum_norm(sum_factor * (x + scale * post_norm(mixer(norm(x)))))`."""

    def __init__(self, spec: ResidualBlockSpec, layer: str, parts: Parts) -> None:
        self._spec = spec
        self._norms = f"{layer}.{spec.mixer.kind}"
        self._weights = parts.weights
        self.mixer = parts.mixer(spec.mixer, layer)

    def added(self, x: Tensor, tokens: Tokens) -> Tensor:
        """What the residual block adds to `x [T, hidden]`."""
        x = self._weights.norm(f"{self._norms}_norm", self._spec.norm, x)
        x = self.mixer(x, tokens)
        return self._weights.norm(f"{self._norms}_post_norm", self._spec.post_norm, x) * self._spec.scale

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The residual stream `[T, hidden]` after the residual block."""
        x = (x + self.added(x, tokens)) * self._spec.sum_factor
        x = self._weights.norm(f"{self._norms}_sum_norm", self._spec.sum_norm, x)
        return x * self._weights[f"{self._norms}_sum_scale"] if self._spec.sum_scale else x


class ResidualBlocks:
    """Mixers are made of these. What tokens leave behind is kept in the residual blocks."""

    def __init__(self, specs: Sequence[ResidualBlockSpec], layer: str, parts: Parts) -> None:
        self._residuals = [ResidualBlock(spec, layer, parts) for spec in specs]

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Copy the KV blocks of all residual blocks."""
        for residual in self._residuals:
            residual.mixer.copy_blocks(source, target, window)

    def copy_state(self, source: int, target: int) -> None:
        """Copy the state of all residual blocks."""
        for residual in self._residuals:
            residual.mixer.copy_state(source, target)
