"""The residual block that takes per-layer embeddings in."""

from __future__ import annotations

from torch import Tensor

from ....models.spec import PerLayerSpec
from .mixer import Parts, Tokens
from .mlp import ACTIVATIONS


class PerLayer:
    """`projection(act(gate(x)) * p)`, where p is its layer's input for each token. It remembers nothing."""

    def __init__(self, spec: PerLayerSpec, layer: str, parts: Parts) -> None:
        self._layer, self._activate = spec.layer, ACTIVATIONS[spec.activation]
        self._gate = parts.weights.linear(f"{layer}.per_layer_gate")
        self._projection = parts.weights.linear(f"{layer}.per_layer_projection")

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The mixer's result, `[S, Q, hidden]`."""
        assert tokens.per_layer is not None
        return self._projection(self._activate(self._gate(x).float()) * tokens.per_layer[:, :, self._layer])
