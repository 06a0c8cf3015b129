"""Residual blocks side by side."""

from __future__ import annotations

import jax

from ....models.spec import ParallelSpec
from .mixer import Parts, Pass
from .residual_block import ResidualBlock


class Parallel:
    """The sum of what residual blocks with one input would add."""

    def __init__(self, spec: ParallelSpec, layer: str, parts: Parts) -> None:
        self._residuals = [ResidualBlock(residual, layer, parts) for residual in spec.residuals]

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """The sum over the residual blocks, `[T, hidden]`."""
        first, *others = (residual.added(x, step) for residual in self._residuals)
        return sum(others, first)
