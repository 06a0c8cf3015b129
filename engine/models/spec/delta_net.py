"""The gated delta net."""

from __future__ import annotations

from typing import ClassVar

from ...declaring.record import record
from .norm import NormSpec
from .shapes import Shapes, linear, under


@record(frozen=True, slots=True)
class DeltaNetSpec:
    """A gated delta net (https://arxiv.org/abs/2412.06464), as Qwen3-Next has it.

    Queries, keys and values of a token pass a causal depthwise convolution over `conv_kernel` tokens and SiLU. Queries
    and keys of a head are divided by their length, queries also by `sqrt(key_dim)`. Each key head serves
    `num_value_heads / num_key_heads` value heads in order, or if they are `tiled`, value head i is served by key head
    `i % num_key_heads`. A value head's state S `[key_dim, value_dim]` begins as
    zeros. With `decay = exp(-exp(A_log) * softplus(a + dt_bias))` and `beta = sigmoid(b)`, a token makes it
    `S = decay * S`, then `S += k (beta * (v - S^T k))^T`, and its output is `S^T q`. The outputs of a head are
    normalized by `norm`, and multiplied by `silu(z)`. Raises ValueError for numbers of heads that do not divide.
    """

    kind: ClassVar[str] = "delta_net"

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm: NormSpec
    tiled: bool = False

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(f"{self.num_key_heads} key heads do not divide {self.num_value_heads} value heads")

    @property
    def key_size(self) -> int:
        """The width of all query heads, and of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """The width of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """How many channels pass the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def activations(self) -> int:
        """How many values a token takes: queries, keys, values, gates, decays and betas."""
        return self.conv_size + self.value_size + 2 * self.num_value_heads

    @property
    def state_size(self) -> int:
        """How many numbers are kept of a sequence: all S, and the convolution's last inputs."""
        return self.num_value_heads * self.key_dim * self.value_dim + (self.conv_kernel - 1) * self.conv_size

    @property
    def state_inputs(self) -> int:
        """How many numbers change the state with a token: what is convolved, decays and betas."""
        return self.conv_size + 2 * self.num_value_heads

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights. The convolution's are `[conv_kernel, conv_size]`, flat: the last row is for the token itself."""
        shapes: Shapes = {}
        for name, size in (("q", self.key_size), ("k", self.key_size), ("v", self.value_size), ("z", self.value_size)):
            shapes |= under(f"delta_{name}", linear(size, hidden_size, bias=False))
        for name in ("b", "a"):
            shapes |= under(f"delta_{name}", linear(self.num_value_heads, hidden_size, bias=False))
        shapes["delta_conv.weight"] = (self.conv_kernel * self.conv_size,)
        shapes["delta.A_log"] = shapes["delta.dt_bias"] = (self.num_value_heads,)
        shapes |= under("delta_head_norm", self.norm.shapes(self.value_dim))
        return shapes | under("delta_out", linear(hidden_size, self.value_size, bias=False))
