"""The causal depthwise convolution that recurrent mixers begin with."""

from __future__ import annotations

import torch
from torch import Tensor

from .mixer import Parts, Tokens


class Convolution:
    """A convolution over the last `taps` tokens of `size` channels. The inputs before a launch's are in states."""

    def __init__(self, name: str, size: int, taps: int, parts: Parts, *, bias: bool) -> None:
        self._weight = parts.weights[f"{name}.weight"].view(taps, size)
        self._bias = parts.weights[f"{name}.bias"] if bias else None
        self._past = parts.state(taps - 1, size)
        self._taps = taps

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The results for `x [S, Q, size] float32`, in the same shape."""
        Q, kept = x.shape[1], self._taps - 1
        inputs = torch.cat((self._past.read(tokens.state_slots, tokens.begins), x), 1)
        last = tokens.lengths[:, None] + torch.arange(kept, device=x.device)
        self._past.write(tokens.state_slots, inputs.gather(1, last[:, :, None].expand(-1, -1, x.shape[2])))
        y = inputs[:, :Q] * self._weight[0]
        for tap in range(1, self._taps):
            y = y + inputs[:, tap : tap + Q] * self._weight[tap]
        return y if self._bias is None else y + self._bias
