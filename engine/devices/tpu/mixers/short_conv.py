"""LFM2's gated short convolution."""

from __future__ import annotations

import jax

from ....models.spec import ShortConvSpec
from .convolution import Convolution
from .mixer import Parts, Pass


class ShortConv:
    """`out(c * conv(b * x))`."""

    def __init__(self, spec: ShortConvSpec, layer: str, parts: Parts) -> None:
        self._layer = layer
        self._convolution = Convolution(f"{layer}.conv_taps", (spec.size,), spec.conv_kernel, parts, bias=spec.bias)

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """Convolve the tokens of `x [T, hidden]` with those before them."""
        b, c, x = (step.linear(f"{self._layer}.conv_{name}", x) for name in "bcx")
        (convolved,) = self._convolution([b * x], step)
        return step.linear(f"{self._layer}.conv_out", c * convolved)
