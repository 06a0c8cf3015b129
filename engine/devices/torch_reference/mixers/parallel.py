"""Residual blocks side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.spec import ParallelSpec
from .mixer import Parts, Tokens
from .residual_block import ResidualBlocks


class Parallel(ResidualBlocks):
    """The sum of what residual blocks with one input would add."""

    def __init__(self, spec: ParallelSpec, layer: str, parts: Parts) -> None:
        super().__init__(spec.residuals, layer, parts)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The sum over the residual blocks, `[T, hidden]`."""
        return torch.stack([residual.added(x, tokens) for residual in self._residuals]).sum(0)
