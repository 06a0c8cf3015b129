"""The dense MLP."""

from __future__ import annotations

import jax

from ....models.spec import MlpSpec
from .mixer import Parts, Pass


class Mlp:
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))`."""

    def __init__(self, spec: MlpSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer = spec, layer

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """The MLP's output for `x [T, hidden]`."""
        up = step.linear(f"{self._layer}.up", x)
        if self._spec.gated:
            up = self._activate(step.linear(f"{self._layer}.gate", x)) * up
        else:
            up = self._activate(up)
        return step.linear(f"{self._layer}.down", up)

    def _activate(self, x: jax.Array) -> jax.Array:
        activation = self._spec.activation
        if activation == "silu":
            return jax.nn.silu(x)
        if activation == "gelu_quick":
            return x * jax.nn.sigmoid(1.702 * x)
        if activation == "relu":
            return jax.nn.relu(x)
        if activation == "relu2":
            return jax.numpy.square(jax.nn.relu(x))
        return jax.nn.gelu(x, approximate=activation == "gelu_tanh")
