"""LFM2's gated short convolution."""

from __future__ import annotations

from torch import Tensor

from ....models.spec import ShortConvSpec
from .convolution import Convolution
from .mixer import Parts, Tokens


class ShortConv:
    """`out(c * conv(b * x))`."""

    def __init__(self, spec: ShortConvSpec, layer: str, parts: Parts) -> None:
        self._b, self._c, self._x, self._out = (
            parts.product(f"{layer}.conv_{name}") for name in ("b", "c", "x", "out")
        )
        self._convolution = Convolution(f"{layer}.conv_taps", spec.size, spec.conv_kernel, parts, bias=spec.bias)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Convolve the tokens of `x [S, Q, hidden]` with those before them."""
        b, c, x = (linear(x, tokens).float() for linear in (self._b, self._c, self._x))
        return self._out(c * self._convolution(b * x, tokens), tokens)
