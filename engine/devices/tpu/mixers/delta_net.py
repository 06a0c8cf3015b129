"""The gated delta net."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ....models.spec import DeltaNetSpec
from ..cache import heads_state
from ..heads import convolved_sizes
from ..recurrence import Inputs, recur_on_chips
from .convolution import Convolution
from .mixer import Parts, Pass

_EPS = 1e-6


class DeltaNet:
    """A gated delta net with a state `[value heads, key dim, value dim]` of each sequence."""

    def __init__(self, spec: DeltaNetSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._mesh = spec, layer, parts.mesh
        self._convolution = Convolution(
            f"{layer}.delta_conv", convolved_sizes(spec), spec.conv_kernel, parts, bias=False
        )
        self._index = parts.keep(heads_state(parts.mesh, spec.num_value_heads, spec.key_dim, spec.value_dim))

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """Let each token of `x [T, hidden]` change its sequence's state, and read from it."""
        spec, layer = self._spec, f"{self._layer}.delta"
        T = len(x)
        convolved = self._convolution([step.linear(f"{layer}_{name}", x) for name in "qkv"], step)
        q, k, v = map(jax.nn.silu, convolved)
        rate = jnp.exp(step.params[f"{layer}.A_log"])
        log_decay = -rate * jax.nn.softplus(step.linear(f"{layer}_a", x) + step.params[f"{layer}.dt_bias"])
        inputs = Inputs(
            self._for_values(q) * spec.key_dim**-0.5,
            self._for_values(k),
            v.reshape(T, spec.num_value_heads, spec.value_dim),
            log_decay,
            jax.nn.sigmoid(step.linear(f"{layer}_b", x)),
        )
        step.cache[self._index], result = recur_on_chips(self._mesh, step.cache[self._index], inputs, step.tokens)
        result = step.norm(f"{layer}_head_norm", spec.norm, result).reshape(T, -1)
        return step.linear(f"{layer}_out", result * jax.nn.silu(step.linear(f"{layer}_z", x)))

    def _for_values(self, x: jax.Array) -> jax.Array:
        """Queries or keys `[T, key_size]` of length 1, one for each value head: `[T, H, key_dim]`."""
        spec = self._spec
        x = x.reshape(len(x), spec.num_key_heads, spec.key_dim)
        x = x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + _EPS)
        repeats = spec.num_value_heads // spec.num_key_heads
        return jnp.tile(x, (1, repeats, 1)) if spec.tiled else jnp.repeat(x, repeats, axis=1)
