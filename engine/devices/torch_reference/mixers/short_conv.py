"""LFM2's gated short convolution."""

from __future__ import annotations

import torch
from torch import Tensor

from ....models.spec import ShortConvSpec
from .convolution import Convolution
from .mixer import Parts, Tokens


class ShortConv:
    """`out(c * conv(b * x))`."""

    def __init__(self, spec: ShortConvSpec, layer: str, parts: Parts) -> None:
        self._layer, self._weights = layer, parts.weights
        self._convolution = Convolution(f"{layer}.conv_taps", spec.size, spec.conv_kernel, parts, bias=spec.bias)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Convolve the tokens of `x [T, hidden]` with those before them."""
        assert tokens.state_slots is not None
        b, c, x = (self._weights.linear(f"{self._layer}.conv_{name}", x) for name in "bcx")
        places = zip(tokens.state_slots.tolist(), tokens.positions.tolist(), strict=True)
        convolved = [
            self._convolution(b[t] * x[t], slot, begins=position == 0) for t, (slot, position) in enumerate(places)
        ]
        return self._weights.linear(f"{self._layer}.conv_out", c * torch.stack(convolved))

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Nothing to copy: all is in the state."""

    def copy_state(self, source: int, target: int) -> None:
        """Copy the convolution's inputs."""
        self._convolution.copy_state(source, target)
