"""Mamba2's state space layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ....models.spec import Mamba2Spec
from ..cache import heads_state
from ..heads import convolved_sizes
from ..recurrence import Inputs, recur_on_chips
from .convolution import Convolution
from .mixer import Parts, Pass


class Mamba2:
    """A state space layer with a state `[heads, state dim, head dim]` of each sequence."""

    def __init__(self, spec: Mamba2Spec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._mesh = spec, f"{layer}.mamba", parts.mesh
        self._convolution = Convolution(
            f"{layer}.mamba_conv", convolved_sizes(spec), spec.conv_kernel, parts, bias=spec.conv_bias
        )
        self._index = parts.keep(heads_state(parts.mesh, spec.num_heads, spec.state_dim, spec.head_dim))

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """Let each token of `x [T, hidden]` change its sequence's state, and read from it."""
        spec, layer = self._spec, self._layer
        T = len(x)
        scales = zip(("z", "x", "B", "C", "dt"), spec.input_scales, strict=True)
        z, *conv, dt = (scale * step.linear(f"{layer}_{name}", x) for name, scale in scales)
        x, b, c = map(jax.nn.silu, self._convolution(conv, step))
        x = x.reshape(T, spec.num_heads, spec.head_dim)
        b, c = (
            jnp.repeat(part.reshape(T, spec.num_groups, -1), spec.num_heads // spec.num_groups, axis=1)
            for part in (b, c)
        )
        dt = jnp.clip(jax.nn.softplus(dt + step.params[f"{layer}.dt_bias"]), *spec.dt_limits)
        inputs = Inputs(c, b, dt[:, :, None] * x, -jnp.exp(step.params[f"{layer}.A_log"]) * dt)
        step.cache[self._index], result = recur_on_chips(self._mesh, step.cache[self._index], inputs, step.tokens)
        result += step.params[f"{layer}.D"][:, None] * x
        return step.linear(f"{layer}_out", self._gated(result.reshape(T, -1), z, step))

    def _gated(self, y: jax.Array, z: jax.Array, step: Pass) -> jax.Array:
        spec, gate = self._spec, jax.nn.silu(z)
        if spec.gate == "first":
            y = y * gate
        if spec.norm:
            # The norm's weight is over the whole width, its mean over a group.
            parts = y.reshape(len(y), spec.norm_groups, -1)
            parts = parts * lax.rsqrt(jnp.square(parts).mean(-1, keepdims=True) + spec.norm.eps)
            y = parts.reshape(y.shape) * step.params[f"{self._layer}_gated_norm.weight"]
        return y if spec.gate == "first" else y * gate
