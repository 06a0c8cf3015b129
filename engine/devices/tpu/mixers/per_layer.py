"""The residual block that takes per-layer embeddings in."""

from __future__ import annotations

import jax

from ....models.spec import PerLayerSpec
from .mixer import Parts, Pass
from .mlp import activate


class PerLayer:
    """`projection(act(gate(x)) * p)`, where p is its layer's input for each token."""

    def __init__(self, spec: PerLayerSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer = spec, f"{layer}.per_layer"

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """The residual block's result, `[T, hidden]`."""
        assert step.per_layer is not None
        gate = activate(self._spec.activation, step.linear(f"{self._layer}_gate", x))
        return step.linear(f"{self._layer}_projection", gate * step.per_layer[:, self._spec.layer])
