"""Branches side by side."""

from __future__ import annotations

import jax

from ....models.spec import ParallelSpec
from .branch import Branch
from .mixer import Parts, Pass


class Parallel:
    """The sum of what branches with one input would add."""

    def __init__(self, spec: ParallelSpec, layer: str, parts: Parts) -> None:
        self._branches = [Branch(branch, layer, parts) for branch in spec.branches]

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """The sum over the branches, `[T, hidden]`."""
        first, *others = (branch.added(x, step) for branch in self._branches)
        return sum(others, first)
