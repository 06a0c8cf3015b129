"""Mamba2's state space layer.

Dimensions: S sequences of Q tokens, H heads of D values, G groups of B and C, N values in each of these.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ....models.spec import Mamba2Spec
from .convolution import Convolution
from .mixer import Parts, Tokens
from .recurrence import recur


class Mamba2:
    """A state space layer with a state of `[G, H / G, N, D]` for each sequence."""

    def __init__(self, spec: Mamba2Spec, layer: str, parts: Parts) -> None:
        weights = parts.weights
        self._spec = spec
        self._inputs = [parts.product(f"{layer}.mamba_{name}") for name in ("z", "x", "B", "C", "dt")]
        self._out = parts.product(f"{layer}.mamba_out")
        self._convolution = Convolution(
            f"{layer}.mamba_conv", spec.conv_size, spec.conv_kernel, parts, bias=spec.conv_bias
        )
        self._rate, self._dt_bias = weights[f"{layer}.mamba.A_log"].exp(), weights[f"{layer}.mamba.dt_bias"]
        self._d = weights[f"{layer}.mamba.D"]
        self._norm_weight = weights[f"{layer}.mamba_gated_norm.weight"] if spec.norm else None
        self._state = parts.state(spec.num_groups, spec.num_heads // spec.num_groups, spec.state_dim, spec.head_dim)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Let each token of `x [S, Q, hidden]` change its sequence's state, and read from it."""
        spec, heads = self._spec, (self._spec.num_groups, -1)
        z, *conv, dt = (
            linear(x, tokens).float() * scale for linear, scale in zip(self._inputs, spec.input_scales, strict=True)
        )
        inputs = functional.silu(self._convolution(torch.cat(conv, dim=-1), tokens))
        values, b, c = torch.split(inputs, [spec.size, spec.group_size, spec.group_size], -1)
        values = torch.unflatten(values, -1, (-1, spec.head_dim))
        dt = functional.softplus(dt + self._dt_bias).clamp(*spec.dt_limits) * tokens.are_real[..., None]
        result, state = recur(
            torch.unflatten(c, -1, heads),
            torch.unflatten(b, -1, heads),
            torch.unflatten(dt[..., None] * values, 2, heads),
            torch.unflatten(-self._rate * dt, -1, heads),
            self._state.read(tokens.state_slots, tokens.begins),
        )
        self._state.write(tokens.state_slots, state)
        y = result.flatten(2, 3) + self._d[:, None] * values
        return self._out(self._gated(y.flatten(2), functional.silu(z)), tokens)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        spec = self._spec
        if spec.gate == "first":
            y = y * gate
        if spec.norm is not None and self._norm_weight is not None:
            # The norm's weight is over the whole width, its mean over a group.
            parts = torch.unflatten(y, -1, (spec.norm_groups, -1))
            y = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + spec.norm.eps)).flatten(-2)
            y = y * self._norm_weight
        return y if spec.gate == "first" else y * gate
