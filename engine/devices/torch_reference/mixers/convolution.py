"""The causal depthwise convolution that recurrent mixers begin with."""

from __future__ import annotations

import torch
from torch import Tensor

from .mixer import Parts


class Convolution:
    """A convolution over the last `taps` tokens of `size` channels, with the inputs that each slot's sequence had."""

    def __init__(self, name: str, size: int, taps: int, parts: Parts, *, bias: bool) -> None:
        self._weight = parts.weights[f"{name}.weight"].view(taps, size)
        self._bias = parts.weights[f"{name}.bias"] if bias else None
        self._past = torch.zeros(parts.num_states, taps - 1, size)

    def __call__(self, x: Tensor, slot: int, *, begins: bool) -> Tensor:
        """The result for one token's `x [size]`. The inputs before it are in `slot`, or zeros if it `begins`."""
        past = self._past[slot]
        if begins:
            past.zero_()
        inputs = torch.cat((past, x[None]))
        past.copy_(inputs[1:])
        y = (inputs * self._weight).sum(0)
        return y if self._bias is None else y + self._bias

    def copy_state(self, source: int, target: int) -> None:
        """Copy the inputs that are remembered."""
        self._past[target] = self._past[source]
