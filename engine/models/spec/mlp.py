"""The dense MLP."""

from __future__ import annotations

from typing import ClassVar, Literal

from ...declaring.record import record
from .shapes import Shapes, linear, under

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"]


@record(frozen=True, slots=True)
class MlpSpec:
    """Gated: `down(act(gate_scale * gate(x)) * up(x))`. Plain: `down(act(up(x)))`. `relu2` is `relu(x)^2`,
    and `gelu_quick` is `x * sigmoid(1.702 x)`. All matrices have a `bias`, or with a `down_bias` only down has one.

    With a `cutoff`, a gated one takes of the gate's values only what they are above their mean and `cutoff` standard
    deviations, and 0 for the others (https://arxiv.org/abs/2506.06644). With `clipped` the
    inputs and outputs of each matrix have bounds. Raises ValueError for a scale or a cutoff without a gate, and for
    bounds beside either of them, biases, or no gate.
    """

    kind: ClassVar[str] = "mlp"

    intermediate_size: int
    activation: Activation
    gated: bool
    bias: bool = False
    gate_scale: float = 1.0
    cutoff: float | None = None
    clipped: bool = False
    down_bias: bool = False

    def __post_init__(self) -> None:
        if self.gate_scale != 1 and not self.gated:
            raise ValueError("an MLP without a gate has no scale of it")
        if self.cutoff is not None and not self.gated:
            raise ValueError("only the values of a gate are cut off")
        plain = self.gate_scale == 1 and self.cutoff is None and not self.bias and not self.down_bias
        if self.clipped and not (self.gated and plain):
            raise ValueError("a clipped MLP has a gate, which is neither scaled nor cut off, and no biases")

    @property
    def activations(self) -> int:
        """How many values a token takes between the matrices."""
        return self.intermediate_size * (1 + self.gated + self.clipped)

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights: up and down, and a gate."""
        gate = under("gate", linear(self.intermediate_size, hidden_size, self.bias, self.clipped))
        shapes = gate if self.gated else {}
        shapes |= under("up", linear(self.intermediate_size, hidden_size, self.bias, self.clipped))
        bias = self.bias or self.down_bias
        return shapes | under("down", linear(hidden_size, self.intermediate_size, bias, self.clipped))
