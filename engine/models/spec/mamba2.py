"""Mamba2's state space layer."""

from __future__ import annotations

from typing import ClassVar, Literal

from ...declaring.record import record
from .norm import NormSpec
from .shapes import Shapes, linear, under


@record(frozen=True, slots=True)
class Mamba2Spec:
    """State space duality (https://arxiv.org/abs/2405.21060).

    z, x, B, C and dt are projections of a token, times `input_scales`. x, B and C pass a causal depthwise convolution
    over `conv_kernel` tokens and SiLU. Each of `num_groups` pairs of B and C `[state_dim]` serves
    `num_heads / num_groups` heads of x in order. A head's state S `[state_dim, head_dim]` begins as zeros. With
    `dt = clamp(softplus(dt + dt_bias))` within `dt_limits`, a token makes
    it `S = exp(-exp(A_log) * dt) * S + B (dt * x)^T`, and its output y is `S^T C + D * x`.

    The outputs of all heads are gated by z: `norm(y * silu(z))` with the gate `first`, `norm(y) * silu(z)` with the
    gate `last`; the norm is over each of `norm_groups` parts of the width. Without a norm it is `y * silu(z)`. Raises
    ValueError for numbers that do not divide each other.
    """

    kind: ClassVar[str] = "mamba2"

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_kernel: int
    norm: NormSpec | None
    norm_groups: int = 1
    gate: Literal["first", "last"] = "first"
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    conv_bias: bool = True
    bias: bool = False
    input_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ValueError(f"{self.num_groups} groups do not divide {self.num_heads} heads")
        if self.size % self.norm_groups:
            raise ValueError(f"{self.norm_groups} groups of the norm do not divide {self.size} values")
        if self.norm is not None and (self.norm.kind != "rms" or self.norm.bias or not self.norm.weight):
            raise ValueError("a gated norm is an RMS norm with a weight")
        if not 0 <= self.dt_limits[0] <= self.dt_limits[1]:
            raise ValueError(f"time steps within {self.dt_limits} are none")

    @property
    def size(self) -> int:
        """The width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """The width of all B, and of all C."""
        return self.num_groups * self.state_dim

    @property
    def conv_size(self) -> int:
        """How many channels pass the convolution: x, B and C."""
        return self.size + 2 * self.group_size

    @property
    def activations(self) -> int:
        """How many values a token takes: z, x, B, C and the time steps with their decays."""
        return self.size + self.conv_size + 2 * self.num_heads

    @property
    def state_size(self) -> int:
        """How many numbers are kept of a sequence: all S, and the convolution's last inputs."""
        return self.size * self.state_dim + (self.conv_kernel - 1) * self.conv_size

    @property
    def state_inputs(self) -> int:
        """How many numbers change the state with a token: what is convolved, and the time steps with their decays."""
        return self.conv_size + 2 * self.num_heads

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights. The convolution's are `[conv_kernel, conv_size]`, flat: the last row is for the token itself."""
        sizes = {"z": self.size, "x": self.size, "B": self.group_size, "C": self.group_size, "dt": self.num_heads}
        shapes: Shapes = {}
        for name, size in sizes.items():
            shapes |= under(f"mamba_{name}", linear(size, hidden_size, self.bias))
        shapes["mamba_conv.weight"] = (self.conv_kernel * self.conv_size,)
        if self.conv_bias:
            shapes["mamba_conv.bias"] = (self.conv_size,)
        shapes["mamba.A_log"] = shapes["mamba.D"] = shapes["mamba.dt_bias"] = (self.num_heads,)
        if self.norm:
            shapes |= under("mamba_gated_norm", self.norm.shapes(self.size))
        return shapes | under("mamba_out", linear(hidden_size, self.size, self.bias))
