"""A tower: what turns the patches of an image into embeddings, as plain data."""

from __future__ import annotations

from ...declaring.record import record
from .attention import AttentionSpec
from .experts import ExpertsSpec
from .layers import mixers
from .mlp import Activation, MlpSpec
from .norm import NormSpec
from .residual_block import LayerSpec, ParallelSpec, ResidualBlockSpec
from .shapes import Shapes, linear, under


@record(frozen=True, slots=True)
class ProjectionSpec:
    """`act(norm(x) W^T + bias)`, from rows of `inputs` to rows of `outputs`: of patches, or of a connector."""

    inputs: int
    outputs: int
    bias: bool = False
    norm: NormSpec | None = None
    activation: Activation | None = None

    def shapes(self) -> Shapes:
        """The weights: those of the linear layer, and of a norm."""
        shapes = linear(self.outputs, self.inputs, self.bias)
        return shapes if self.norm is None else shapes | under("norm", self.norm.shapes(self.inputs))


@record(frozen=True, slots=True)
class CrossAttentionSpec:
    """Softmax attention of some rows to others, head by head. It has no weights: projections are around it."""

    num_heads: int
    head_dim: int
    scale: float

    @property
    def width(self) -> int:
        """Of a row of queries, keys or values: all heads together."""
        return self.num_heads * self.head_dim


@record(frozen=True, slots=True)
class TowerSpec:
    """The parts of a tower. What puts them in an order is its family's `Vision`.

    `layers` compute rows of `hidden_size`. Where attention is `two_way`, each row sees all rows of its segment, or
    those less than a `sliding_window` away, otherwise only itself and those before it. `projections` are linear layers
    outside of them, by name, and `tables` small arrays that are added, joined or normalized with, by name and shape:
    position embeddings, class embeddings, weights of norms between layers. `cross_attentions` let rows of one kind see
    rows of another, as a resampler's learned queries see the rows behind the layers.

    A layer has at most one attention, as its first residual block or the first of several side by side, and MLPs or
    experts. Raises ValueError for any other, and for attention that has what only decoders have.
    """

    hidden_size: int
    layers: tuple[LayerSpec, ...]
    projections: tuple[tuple[str, ProjectionSpec], ...] = ()
    tables: tuple[tuple[str, tuple[int, ...]], ...] = ()
    cross_attentions: tuple[tuple[str, CrossAttentionSpec], ...] = ()

    @property
    def reach(self) -> int | None:
        """How far ahead a row of any layer sees, itself included: 1 if one is causal; None: to its segment's end."""
        attentions = [mixer for layer in self.layers for mixer in mixers(layer) if isinstance(mixer, AttentionSpec)]
        reaches = [attention.sliding_window if attention.two_way else 1 for attention in attentions]
        return min((reach for reach in reaches if reach is not None), default=None)

    def __post_init__(self) -> None:
        for layer in self.layers:
            for index, residual in enumerate(layer):
                mixer = residual.mixer
                beside = mixer.residuals if isinstance(mixer, ParallelSpec) else (residual,)
                for number, part in enumerate(beside):
                    _check(part, is_first=index == number == 0)


def _check(residual: ResidualBlockSpec, *, is_first: bool) -> None:
    mixer = residual.mixer
    if isinstance(mixer, ExpertsSpec):
        return
    if not isinstance(mixer, AttentionSpec | MlpSpec):
        raise ValueError(f"a tower's layers have attention, MLPs and experts, not {mixer.kind}")
    if mixer.clipped and residual.post_norm is None:
        raise ValueError("behind clipped matrices there must be a norm")
    if not isinstance(mixer, AttentionSpec):
        return
    if not is_first:
        raise ValueError("attention must be the first residual block of a tower's layer")
    if mixer.kv_layer is not None or mixer.output_gate or mixer.sinks:
        raise ValueError("attention in a tower has neither another layer's K and V, nor an output gate, nor sinks")


def tower_shapes(spec: TowerSpec) -> Shapes:
    """The weights that `spec` needs: Tidewheel's name to shape, linear weights as `(out_features, in_features)`."""
    shapes: Shapes = dict(spec.tables)
    for name, projection in spec.projections:
        shapes |= under(name, projection.shapes())
    for i, layer in enumerate(spec.layers):
        for residual in layer:
            shapes |= under(f"layers.{i}", residual.shapes(spec.hidden_size))
    return shapes
