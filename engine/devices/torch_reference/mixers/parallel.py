"""Branches side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.spec import ParallelSpec
from .branch import Branches
from .mixer import Parts, Tokens


class Parallel(Branches):
    """The sum of what branches with one input would add."""

    def __init__(self, spec: ParallelSpec, layer: str, parts: Parts) -> None:
        super().__init__(spec.branches, layer, parts)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The sum over the branches, `[T, hidden]`."""
        return torch.stack([branch.added(x, tokens) for branch in self._branches]).sum(0)
