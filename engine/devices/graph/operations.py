"""Operations that an accelerator may do in its own way. A kind of accelerator that has none needs none of this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .sampler import Keep, keep_by_sorting

RmsNorm = Callable[[Tensor, Tensor, float], Tensor]
"""`x [..., N]` and `weight [N]`, both float32, and epsilon; returns `x / rms(x) * weight`."""

Rotate = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""Rope on all dimensions of `x [S, Q, heads, 2 * P]` by `cos` and `sin [S, Q, P]`, in float32.

Dimension i is paired with `i + P`, or if the flag is set, 2i with 2i + 1.
"""


@dataclass(frozen=True, slots=True)
class Operations:
    """How a device normalizes, rotates, and leaves out unlikely tokens. None: by torch's own operations."""

    rms_norm: RmsNorm | None = None
    rotate: Rotate | None = None
    keep: Keep = keep_by_sorting
