"""The dense MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional

from ....models.spec import Activation, MlpSpec
from .mixer import Parts, Tokens

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu_quick": lambda x: x * (1.702 * x).sigmoid(),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
"""The activation functions, of float32."""


class Mlp:
    """An MLP. It remembers nothing."""

    def __init__(self, spec: MlpSpec, layer: str, parts: Parts) -> None:
        self._gate = parts.product(f"{layer}.gate") if spec.gated else None
        self._up = parts.product(f"{layer}.up")
        self._down = parts.product(f"{layer}.down")
        self._activate = ACTIVATIONS[spec.activation]
        self._gate_scale, self._cutoff = spec.gate_scale, spec.cutoff

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """`down(act(gate_scale * gate(x)) * up(x))`, or `down(act(up(x)))`, with the activation in float32."""
        up = self._up(x, tokens).float()
        if self._gate is None:
            return self._down(self._activate(up), tokens)
        gate = self._gate(x, tokens).float() * self._gate_scale
        if self._cutoff is not None:
            # What is above the mean of a token's values plus some standard deviations.
            least = gate.mean(-1, keepdim=True) + self._cutoff * gate.std(-1, keepdim=True, unbiased=False)
            gate = functional.relu(gate - least)
        return self._down(self._activate(gate) * up, tokens)
