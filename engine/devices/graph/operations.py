"""Operations that an accelerator may do in its own way. A kind of accelerator that has none needs none of this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..grouped_weights import GroupedMatrix
from .sampler import Keep, keep_by_sorting

RmsNorm = Callable[[Tensor, Tensor, float], Tensor]
"""`x [..., N]` and `weight [N]`, both float32, and epsilon; returns `x / rms(x) * weight`."""

Rotate = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""Rope on all dimensions of `x [S, Q, heads, 2 * P]` by `cos` and `sin [S, Q, P]`, in float32.

Dimension i is paired with `i + P`, or if the flag is set, 2i with 2i + 1.
"""


class Matrix(Protocol):
    """A matrix `[N, K]` that is not kept as a tensor. What is computed with it has the type `dtype`."""

    dtype: torch.dtype

    def multiply(self, x: Tensor) -> Tensor:
        """`x W^T` of `x [..., K]`, which has the type `dtype`."""
        ...

    def dense(self) -> Tensor:
        """All weights, `[N, K]`."""
        ...


Store = Callable[[str, "Tensor | GroupedMatrix"], "Matrix | None"]
"""The weight of a name, which is on the host, as the device keeps it. None: as all devices keep it."""


@dataclass(frozen=True, slots=True)
class Operations:
    """How a device normalizes, rotates, leaves out unlikely tokens, and keeps weights. None: as torch alone does."""

    rms_norm: RmsNorm | None = None
    rotate: Rotate | None = None
    keep: Keep = keep_by_sorting
    store: Store | None = None
