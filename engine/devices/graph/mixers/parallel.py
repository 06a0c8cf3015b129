"""Branches side by side."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....models.spec import ParallelSpec
from .branch import Branch
from .mixer import Parts, Tokens


class Parallel:
    """The sum of what branches with one input would add."""

    def __init__(self, spec: ParallelSpec, layer: str, parts: Parts) -> None:
        adds_up = any(branch.post_norm for branch in spec.branches)
        self._first, *self._others = [Branch(branch, layer, parts, adds_up) for branch in spec.branches]

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The sum over the branches, `[S, Q, hidden]`."""
        added = self._first.added(x, tokens)
        for branch in self._others:
            added = added + branch.added(x, tokens)
        return added

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Make room in all branches."""
        for branch in (self._first, *self._others):
            branch.mixer.allocate(num_blocks)

    def copy_slots(self, source: Tensor, target: Tensor, group: int) -> None:
        """Copy those of all branches."""
        for branch in (self._first, *self._others):
            branch.mixer.copy_slots(source, target, group)
