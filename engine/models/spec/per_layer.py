"""Per-layer embeddings: an input of each layer for a token, and the residual block that takes it in.

See https://developers.googleblog.com/en/introducing-gemma-3n-developer-guide/ (PLE).
"""

from __future__ import annotations

from typing import ClassVar

from ...declaring.record import record
from .mlp import Activation
from .norm import NormSpec
from .shapes import Shapes, linear, under


@record(frozen=True, slots=True)
class PerLayerEmbeddingSpec:
    """All layers' inputs for a token, `[layers, size]`, made of its id and of its embedding x.

    `sum_scale * (norm(projection_scale * W x) + scale * table[id])`, the norm over each layer's `size` values. The
    table is `[vocab_size, layers * size]`. Ids beyond it have row 0, and so have rows of media.
    """

    vocab_size: int
    size: int
    scale: float
    projection_scale: float
    sum_scale: float
    norm: NormSpec

    def shapes(self, hidden_size: int, num_layers: int) -> Shapes:
        """The weights: the table, W and the norm."""
        width = num_layers * self.size
        shapes: Shapes = {"per_layer": (self.vocab_size, width)}
        shapes |= under("per_layer_projection", linear(width, hidden_size, bias=False))
        return shapes | under("per_layer_norm", self.norm.shapes(self.size))


@record(frozen=True, slots=True)
class PerLayerSpec:
    """The mixer `projection(act(gate(x)) * p)`, where p are the `size` values of the token for `layer`."""

    kind: ClassVar[str] = "per_layer"

    layer: int
    size: int
    activation: Activation

    @property
    def activations(self) -> int:
        """The gate's results."""
        return self.size

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights: the gate and the projection."""
        shapes = under("per_layer_gate", linear(self.size, hidden_size, bias=False))
        return shapes | under("per_layer_projection", linear(hidden_size, self.size, bias=False))
