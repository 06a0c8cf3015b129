"""The gated delta net.

Dimensions: S sequences of Q tokens, G key heads, R value heads of each, K and V the sizes of a key and of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ....models.spec import DeltaNetSpec
from .convolution import Convolution
from .mixer import Parts, Tokens
from .recurrence import recur

_EPS = 1e-6


class DeltaNet:
    """A gated delta net with a state of `[G, R, K, V]` for each sequence."""

    def __init__(self, spec: DeltaNetSpec, layer: str, parts: Parts) -> None:
        weights = parts.weights
        self._spec = spec
        self._q, self._k, self._v, self._z, self._b, self._a, self._out = (
            parts.product(f"{layer}.delta_{name}") for name in ("q", "k", "v", "z", "b", "a", "out")
        )
        self._convolution = Convolution(f"{layer}.delta_conv", spec.conv_size, spec.conv_kernel, parts, bias=False)
        self._rate, self._dt_bias = weights[f"{layer}.delta.A_log"].exp(), weights[f"{layer}.delta.dt_bias"]
        self._norm = weights.norm(f"{layer}.delta_head_norm", spec.norm)
        # Value heads are in the order of their key heads, or else each has a copy of its own.
        self._groups = spec.num_value_heads if spec.tiled else spec.num_key_heads
        self._state = parts.state(self._groups, spec.num_value_heads // self._groups, spec.key_dim, spec.value_dim)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Let each token of `x [S, Q, hidden]` change its sequence's state, and read from it."""
        spec, heads = self._spec, (self._groups, -1)
        qkv = torch.cat([linear(x, tokens).float() for linear in (self._q, self._k, self._v)], dim=-1)
        qkv = functional.silu(self._convolution(qkv, tokens))
        q, k, v = torch.split(qkv, [spec.key_size, spec.key_size, spec.value_size], -1)
        q, k = (_unit(torch.unflatten(part, -1, (-1, spec.key_dim))) for part in (q, k))
        if spec.tiled:
            q, k = (part.repeat(1, 1, self._groups // spec.num_key_heads, 1) for part in (q, k))
        real = tokens.are_real[..., None]
        beta = self._b(x, tokens).float().sigmoid() * real
        log_decay = -self._rate * functional.softplus(self._a(x, tokens).float() + self._dt_bias) * real
        result, state = recur(
            q * spec.key_dim**-0.5,
            k,
            torch.unflatten(v, -1, (*heads, spec.value_dim)),
            torch.unflatten(log_decay, -1, heads),
            self._state.read(tokens.state_slots, tokens.begins),
            torch.unflatten(beta, -1, heads),
        )
        self._state.write(tokens.state_slots, state)
        gate = functional.silu(self._z(x, tokens).float())
        return self._out(self._norm(result).flatten(2) * gate, tokens)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
