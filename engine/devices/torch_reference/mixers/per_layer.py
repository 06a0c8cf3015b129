"""The residual block that takes per-layer embeddings in."""

from __future__ import annotations

from torch import Tensor

from ....errors import DeviceError
from ....models.spec import PerLayerSpec
from .mixer import Parts, Tokens
from .mlp import activate


class PerLayer:
    """`projection(act(gate(x)) * p)`, where p is its layer's input for each token. It keeps no state."""

    def __init__(self, spec: PerLayerSpec, layer: str, parts: Parts) -> None:
        self._spec, self._layer, self._weights = spec, layer, parts.weights

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The residual block's result, `[T, hidden]`."""
        if tokens.per_layer is None:
            raise DeviceError("the torch device was given tokens without per-layer embeddings")
        gate = activate(self._spec.activation, self._weights.linear(f"{self._layer}.per_layer_gate", x))
        gated = gate * tokens.per_layer[:, self._spec.layer]
        return self._weights.linear(f"{self._layer}.per_layer_projection", gated)

    def copy_blocks(self, source: Tensor, target: Tensor, window: int | None) -> None:
        """Nothing to copy."""

    def copy_state(self, source: int, target: int) -> None:
        """Nothing to copy."""
