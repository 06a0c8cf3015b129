"""The dense MLP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ....models.spec import Activation, MlpSpec
from .mixer import Parts, Tokens


class Mlp:
    """An MLP. It remembers nothing."""

    def __init__(self, spec: MlpSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._weights = spec, layer, parts.weights

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """`down(act(gate_scale * gate(x)) * up(x))`, or `down(act(up(x)))`."""
        spec, up = self._spec, self._weights.linear(f"{self._layer}.up", x)
        if spec.gated:
            gate = cut_off(spec.gate_scale * self._weights.linear(f"{self._layer}.gate", x), spec.cutoff)
            up = activate(spec.activation, gate) * up
        else:
            up = activate(spec.activation, up)
        return self._weights.linear(f"{self._layer}.down", up)

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Nothing to copy."""

    def copy_state(self, source: int, target: int) -> None:
        """Nothing to copy."""


def cut_off(gate: Tensor, cutoff: float | None) -> Tensor:
    """How far `gate [T, values]` is above the mean of its row plus `cutoff` standard deviations; 0 if it is below."""
    if cutoff is None:
        return gate
    least = gate.mean(-1, keepdim=True) + cutoff * gate.std(-1, keepdim=True, unbiased=False)
    return functional.relu(gate - least)


def activate(activation: Activation, x: Tensor) -> Tensor:
    """The activation function of every element."""
    if activation == "silu":
        return functional.silu(x)
    if activation == "gelu_quick":
        return x * torch.sigmoid(1.702 * x)
    if activation == "relu":
        return functional.relu(x)
    if activation == "relu2":
        return functional.relu(x).square()
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
