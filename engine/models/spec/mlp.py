"""The dense MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .shapes import Shapes, linear, under

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Gated: `down(act(gate(x)) * up(x))`. Plain: `down(act(up(x)))`."""

    kind: ClassVar[str] = "mlp"

    intermediate_size: int
    activation: Activation
    gated: bool
    bias: bool = False

    @property
    def activations(self) -> int:
        """How many values a token takes between the matrices."""
        return self.intermediate_size * (2 if self.gated else 1)

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights: up and down, and a gate."""
        shapes = under("gate", linear(self.intermediate_size, hidden_size, self.bias)) if self.gated else {}
        shapes |= under("up", linear(self.intermediate_size, hidden_size, self.bias))
        return shapes | under("down", linear(hidden_size, self.intermediate_size, self.bias))
