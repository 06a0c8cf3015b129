"""Mamba2's state space layer, token by token.

Dimensions: T tokens, H heads of D values, G groups of B and C, N values in each of these.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ....models.spec import Mamba2Spec
from .convolution import Convolution
from .mixer import Parts, Tokens


class Mamba2:
    """A state space layer with a state of its own in each slot, `[slots, H, N, D]`."""

    def __init__(self, spec: Mamba2Spec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._weights = spec, layer, parts.weights
        self._convolution = Convolution(
            f"{layer}.mamba_conv", spec.conv_size, spec.conv_kernel, parts, bias=spec.conv_bias
        )
        self._states = torch.zeros(parts.num_states, spec.num_heads, spec.state_dim, spec.head_dim)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Let each token of `x [T, hidden]` change its sequence's state, and read from it."""
        assert tokens.state_slots is not None
        scales = zip(("z", "x", "B", "C", "dt"), self._spec.input_scales, strict=True)
        z, *conv, dt = (scale * self._linear(name, x) for name, scale in scales)
        inputs = torch.cat(conv, dim=-1)
        dt = functional.softplus(dt + self._own("dt_bias")).clamp(*self._spec.dt_limits)
        decay = torch.exp(-torch.exp(self._own("A_log")) * dt)
        places = zip(tokens.state_slots.tolist(), tokens.positions.tolist(), strict=True)
        outputs = [
            self._step(inputs[t], decay[t], dt[t], slot, begins=position == 0)
            for t, (slot, position) in enumerate(places)
        ]
        return self._linear("out", self._gated(torch.stack(outputs), z))

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Nothing to copy: all is in the state."""

    def copy_state(self, source: int, target: int) -> None:
        """Copy the state and the convolution's inputs."""
        self._states[target] = self._states[source]
        self._convolution.copy_state(source, target)

    def _step(self, inputs: Tensor, decay: Tensor, dt: Tensor, slot: int, *, begins: bool) -> Tensor:
        """One token: `inputs [H D + 2 G N]`, `decay [H]`, `dt [H]`; returns `[H D]`."""
        spec = self._spec
        inputs = functional.silu(self._convolution(inputs, slot, begins=begins))
        x, b, c = torch.tensor_split(inputs, [spec.size, spec.size + spec.group_size])
        x = x.view(-1, spec.head_dim)
        b, c = (
            part.view(-1, spec.state_dim).repeat_interleave(spec.num_heads // spec.num_groups, 0) for part in (b, c)
        )
        state = self._states[slot]
        if begins:
            state.zero_()
        state *= decay[:, None, None]
        state += b[:, :, None] * (dt[:, None] * x)[:, None, :]
        result: Tensor = (state * c[:, :, None]).sum(1) + self._own("D")[:, None] * x
        return result.flatten()

    def _gated(self, y: Tensor, z: Tensor) -> Tensor:
        spec, gate = self._spec, functional.silu(z)
        if spec.gate == "first":
            y = y * gate
        if spec.norm:
            # The norm's weight is over the whole width, its mean over a group.
            parts = y.view(len(y), spec.norm_groups, -1)
            y = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + spec.norm.eps)).flatten(1)
            y = y * self._weights[f"{self._layer}.mamba_gated_norm.weight"]
        return y if spec.gate == "first" else y * gate

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self._weights.linear(f"{self._layer}.mamba_{name}", x)

    def _own(self, name: str) -> Tensor:
        return self._weights[f"{self._layer}.mamba.{name}"]
