"""The dense MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ....models.spec import Activation, MlpSpec
from .mixer import Parts, Pass


class Mlp:
    """`down(act(gate_scale * gate(x)) * up(x))`, or `down(act(up(x)))`."""

    def __init__(self, spec: MlpSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer = spec, layer

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """The MLP's output for `x [T, hidden]`."""
        spec, up = self._spec, step.linear(f"{self._layer}.up", x)
        if spec.gated:
            gate = cut_off(spec.gate_scale * step.linear(f"{self._layer}.gate", x), spec.cutoff)
            up = activate(spec.activation, gate) * up
        else:
            up = activate(spec.activation, up)
        return step.linear(f"{self._layer}.down", up)


def cut_off(gate: jax.Array, cutoff: float | None) -> jax.Array:
    """How far `gate [T, values]` is above the mean of its row plus `cutoff` standard deviations; 0 if it is below."""
    if cutoff is None:
        return gate
    return jax.nn.relu(gate - gate.mean(-1, keepdims=True) - cutoff * gate.std(-1, keepdims=True))


def activate(activation: Activation, x: jax.Array) -> jax.Array:
    """The activation function of every element."""
    if activation == "silu":
        return jax.nn.silu(x)
    if activation == "gelu_quick":
        return x * jax.nn.sigmoid(1.702 * x)
    if activation == "relu":
        return jax.nn.relu(x)
    if activation == "relu2":
        return jnp.square(jax.nn.relu(x))
    return jax.nn.gelu(x, approximate=activation == "gelu_tanh")
