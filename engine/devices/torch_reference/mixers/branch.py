"""Residual branches: mixers and the norms around them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....models.spec import BranchSpec
from .mixer import Parts, Tokens


class Branch:
    """`x = sum_scale * sum_norm(sum_factor * (x + scale * post_norm(mixer(norm(x)))))`."""

    def __init__(self, spec: BranchSpec, layer: str, parts: Parts) -> None:
        self._spec = spec
        self._norms = f"{layer}.{spec.mixer.kind}"
        self._weights = parts.weights
        self.mixer = parts.mixer(spec.mixer, layer)

    def added(self, x: Tensor, tokens: Tokens) -> Tensor:
        """What the branch adds to `x [T, hidden]`."""
        x = self._weights.norm(f"{self._norms}_norm", self._spec.norm, x)
        x = self.mixer(x, tokens)
        return self._weights.norm(f"{self._norms}_post_norm", self._spec.post_norm, x) * self._spec.scale

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The residual stream `[T, hidden]` after the branch."""
        x = (x + self.added(x, tokens)) * self._spec.sum_factor
        x = self._weights.norm(f"{self._norms}_sum_norm", self._spec.sum_norm, x)
        return x * self._weights[f"{self._norms}_sum_scale"] if self._spec.sum_scale else x


class Branches:
    """Mixers are made of these. What tokens leave behind is kept in the branches."""

    def __init__(self, specs: Sequence[BranchSpec], layer: str, parts: Parts) -> None:
        self._branches = [Branch(spec, layer, parts) for spec in specs]

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Copy those of all branches."""
        for branch in self._branches:
            branch.mixer.copy_blocks(source, target, window)

    def copy_state(self, source: int, target: int) -> None:
        """Copy that of all branches."""
        for branch in self._branches:
            branch.mixer.copy_state(source, target)
