"""The gated short convolution."""

from __future__ import annotations

from typing import ClassVar

from ...declaring.record import record
from .shapes import Shapes, linear, under


@record(frozen=True, slots=True)
class ShortConvSpec:
    """LFM2's convolution (https://arxiv.org/abs/2511.23404): `out(c * conv(b * x))`.

    b, c and x are projections of a token, each as wide as the model. The convolution is causal and depthwise, over
    `conv_kernel` tokens; what lies before the first token is zero. `bias`: both projections and it have one.
    """

    kind: ClassVar[str] = "short_conv"

    size: int
    conv_kernel: int
    bias: bool = False

    @property
    def activations(self) -> int:
        """How many values a token takes: b, c and x."""
        return 3 * self.size

    @property
    def state_size(self) -> int:
        """How many numbers are kept of a sequence: the convolution's last inputs."""
        return (self.conv_kernel - 1) * self.size

    @property
    def state_inputs(self) -> int:
        """How many numbers change the state with a token."""
        return self.size

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights. The convolution's are `[conv_kernel, size]`, flat: the last row is for the token itself."""
        shapes: Shapes = {}
        for name in ("b", "c", "x"):
            shapes |= under(f"conv_{name}", linear(self.size, hidden_size, self.bias))
        shapes["conv_taps.weight"] = (self.conv_kernel * self.size,)
        if self.bias:
            shapes["conv_taps.bias"] = (self.size,)
        return shapes | under("conv_out", linear(hidden_size, self.size, self.bias))
