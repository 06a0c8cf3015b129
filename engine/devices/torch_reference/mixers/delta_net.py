"""The gated delta net, token by token.

Dimensions: T tokens, G key heads, H value heads, K and V the sizes of a key and of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ....models.spec import DeltaNetSpec
from .convolution import Convolution
from .mixer import Parts, Tokens

_EPS = 1e-6


class DeltaNet:
    """A gated delta net with a state of its own in each slot, `[slots, H, K, V]`."""

    def __init__(self, spec: DeltaNetSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._weights = spec, layer, parts.weights
        self._convolution = Convolution(f"{layer}.delta_conv", spec.conv_size, spec.conv_kernel, parts, bias=False)
        self._states = torch.zeros(parts.num_states, spec.num_value_heads, spec.key_dim, spec.value_dim)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Let each token of `x [T, hidden]` change its sequence's state, and read from it."""
        spec, linear = self._spec, self._linear
        assert tokens.state_slots is not None
        qkv = torch.cat([linear("q", x), linear("k", x), linear("v", x)], dim=-1)
        beta = torch.sigmoid(linear("b", x))
        rate = torch.exp(self._weights[f"{self._layer}.delta.A_log"])
        decay = torch.exp(-rate * functional.softplus(linear("a", x) + self._weights[f"{self._layer}.delta.dt_bias"]))
        places = zip(tokens.state_slots.tolist(), tokens.positions.tolist(), strict=True)
        outputs = [
            self._step(qkv[t], decay[t], beta[t], slot, begins=position == 0)
            for t, (slot, position) in enumerate(places)
        ]
        result = torch.stack(outputs)
        result = self._weights.norm(f"{self._layer}.delta_head_norm", spec.norm, result)
        result = result.flatten(1) * functional.silu(linear("z", x))
        return linear("out", result)

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Nothing to copy: all is in the state."""

    def copy_state(self, source: int, target: int) -> None:
        """Copy the state and the convolution's inputs."""
        self._states[target] = self._states[source]
        self._convolution.copy_state(source, target)

    def _step(self, qkv: Tensor, decay: Tensor, beta: Tensor, slot: int, *, begins: bool) -> Tensor:
        """One token: `qkv [2 G K + H V]`, `decay [H]`, `beta [H]`; returns `[H, V]`."""
        spec = self._spec
        qkv = functional.silu(self._convolution(qkv, slot, begins=begins))
        q, k, v = torch.tensor_split(qkv, [spec.key_size, 2 * spec.key_size])
        repeats = spec.num_value_heads // spec.num_key_heads
        q, k = _unit(q.view(-1, spec.key_dim)) * spec.key_dim**-0.5, _unit(k.view(-1, spec.key_dim))
        q, k = (x.repeat(repeats, 1) if spec.tiled else x.repeat_interleave(repeats, 0) for x in (q, k))
        state = self._states[slot]
        if begins:
            state.zero_()
        state *= decay[:, None, None]
        known = (state * k[:, :, None]).sum(1)
        correction = beta[:, None] * (v.view(-1, spec.value_dim) - known)
        state += k[:, :, None] * correction[:, None, :]
        result: Tensor = (state * q[:, :, None]).sum(1)
        return result

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self._weights.linear(f"{self._layer}.delta_{name}", x)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
