"""The dense MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.nn import functional

from ....models.spec import Activation, MlpSpec
from .mixer import Parts, Tokens

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu_quick": lambda x: x * (1.702 * x).sigmoid(),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


class Mlp:
    """An MLP. It remembers nothing."""

    def __init__(self, spec: MlpSpec, layer: str, parts: Parts) -> None:
        weights = parts.weights
        self._gate = weights.linear(f"{layer}.gate") if spec.gated else None
        self._up = weights.linear(f"{layer}.up")
        self._down = weights.linear(f"{layer}.down")
        self._activate = _ACTIVATIONS[spec.activation]

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))`, with the activation in float32."""
        up = self._up(x).float()
        up = self._activate(up) if self._gate is None else self._activate(self._gate(x).float()) * up
        return self._down(up)

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Nothing is remembered."""

    def copy_slots(self, source: Tensor, target: Tensor, group: int) -> None:
        """Nothing to copy."""
