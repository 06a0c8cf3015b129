"""Residual blocks side by side."""

from __future__ import annotations

from torch import Tensor

from ....models.spec import ParallelSpec
from .mixer import Parts, Tokens
from .residual_block import ResidualBlock


class Parallel:
    """The sum of what residual blocks with one input would add."""

    def __init__(self, spec: ParallelSpec, layer: str, parts: Parts) -> None:
        adds_up = any(residual.post_norm for residual in spec.residuals)
        self._first, *self._others = [ResidualBlock(residual, layer, parts, adds_up) for residual in spec.residuals]

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The sum over the residual blocks, `[S, Q, hidden]`."""
        added = self._first.added(x, tokens)
        for residual in self._others:
            added = added + residual.added(x, tokens)
        return added
