"""Branches side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.spec import ParallelSpec
from .branch import Branch
from .mixer import Parts, Tokens


class Parallel:
    """The sum of what branches with one input would add."""

    def __init__(self, spec: ParallelSpec, layer: str, parts: Parts) -> None:
        self._branches = [Branch(branch, layer, parts) for branch in spec.branches]

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The sum over the branches, `[T, hidden]`."""
        return torch.stack([branch.added(x, tokens) for branch in self._branches]).sum(0)

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Copy those of all branches."""
        for branch in self._branches:
            branch.mixer.copy_blocks(source, target, window)

    def copy_state(self, source: int, target: int) -> None:
        """Copy that of all branches."""
        for branch in self._branches:
            branch.mixer.copy_state(source, target)
