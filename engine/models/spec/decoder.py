"""A whole decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from ...declaring.record import record
from .alt_up import AltUpSpec, StreamsSpec
from .attention import AttentionSpec, KvShape
from .delta_net import DeltaNetSpec
from .eagle3 import Eagle3Spec
from .experts import ExpertsSpec
from .latent_attention import LatentAttentionSpec
from .layers import mixers
from .mamba2 import Mamba2Spec
from .mlp import MlpSpec
from .mtp import MtpSpec
from .norm import NormSpec
from .per_layer import PerLayerEmbeddingSpec, PerLayerSpec
from .residual_block import LayerSpec, MixerSpec
from .shapes import Shapes, linear, under
from .short_conv import ShortConvSpec

Recurrence: TypeAlias = DeltaNetSpec | Mamba2Spec | ShortConvSpec
_STATE_BYTES = 4  # a number of state is float32 on every device


@record(frozen=True, slots=True)
class EmbeddingSpec:
    """Token embedding `[vocab, size]`, plus learned positions if `num_positions` is not 0.

    A token's row is multiplied by `scale`. When `size` is not the hidden size, a projection without bias follows, and
    another precedes the head. Row `position + position_offset` of the `[num_positions + position_offset, hidden]` table
    is added, and the sum is normalized if there is a `norm`. `per_layer` is an additional input of each layer.
    """

    size: int
    num_positions: int = 0
    position_offset: int = 0
    scale: float = 1.0
    norm: NormSpec | None = None
    per_layer: PerLayerEmbeddingSpec | None = None


@record(frozen=True, slots=True)
class HeadSpec:
    """Logits: `y = (x W^T + bias) / divisor`, then `softcap * tanh(y / softcap)` if there is a cap.

    W is the embedding if `tied`.
    """

    tied: bool
    softcap: float | None = None
    divisor: float = 1.0
    bias: bool = False

    def __post_init__(self) -> None:
        if self.divisor <= 0 or (self.softcap is not None and self.softcap <= 0):
            raise ValueError("the logits' divisor and softcap must be above 0")


@record(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder. `max_positions` is the longest context, in tokens, that the weights and tables allow.

    With `streams` a token has several rows between embedding and head, which AltUpSpecs compute with. An `mtp` layer
    or an `eagle3` layer drafts tokens; no other layer reads what it gives.

    Raises ValueError for layers that read what no earlier layer has, and for those that only towers may have.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    head: HeadSpec
    streams: StreamsSpec | None = None
    mtp: MtpSpec | None = None
    eagle3: Eagle3Spec | None = None

    def __post_init__(self) -> None:
        per_layer = self.embedding.per_layer
        for index, layer in enumerate(self.layers):
            for mixer in mixers(layer):
                if isinstance(mixer, AltUpSpec) and (self.streams is None or self.streams.count != mixer.streams):
                    raise ValueError(
                        f"layer {index} needs {mixer.streams} streams, which the embedding does not produce"
                    )
                if _is_for_towers(mixer):
                    raise ValueError(f"layer {index} has bounds, biases or positions that only those of towers have")
                if isinstance(mixer, AttentionSpec) and mixer.kv_layer is not None:
                    self._require_kv(index, mixer, mixer.kv_layer)
                if isinstance(mixer, PerLayerSpec) and (
                    per_layer is None or mixer.size != per_layer.size or mixer.layer >= len(self.layers)
                ):
                    raise ValueError(
                        f"layer {index} needs {mixer.size} values of each token, which the embedding does not have"
                    )

    def _require_kv(self, index: int, attention: AttentionSpec, kv_layer: int) -> None:
        earlier = mixers(self.layers[kv_layer]) if 0 <= kv_layer < index else iter(())
        wanted = replace(attention, kv_layer=None).cached
        if [m.cached for m in earlier if isinstance(m, AttentionSpec)] != [wanted]:
            raise ValueError(f"layer {index} reads the K and V of layer {kv_layer}, which has other heads")

    def attentions(self) -> Iterator[AttentionSpec]:
        """The attention mixers of all layers in order, without those to latents."""
        for layer in self.layers:
            yield from (mixer for mixer in mixers(layer) if isinstance(mixer, AttentionSpec))

    def recurrences(self) -> Iterator[Recurrence]:
        """The recurrent mixers of all layers in order: each keeps state of its own of a sequence."""
        for layer in self.layers:
            yield from (mixer for mixer in mixers(layer) if isinstance(mixer, Recurrence))

    @property
    def state_bytes(self) -> int:
        """The size of all recurrent mixers' state of one sequence of any length; 0: there are none."""
        return _STATE_BYTES * sum(mixer.state_size for mixer in self.recurrences())

    @property
    def state_input_bytes(self) -> int:
        """The size of a token's inputs to the recurrent mixers, from which their states can be computed again."""
        return _STATE_BYTES * sum(mixer.state_inputs for mixer in self.recurrences())

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """The layers, and behind them the one that predicts tokens, if there is one."""
        predicting = self.mtp or self.eagle3
        return self.layers if predicting is None else (*self.layers, predicting.layer)

    def caches(self) -> Iterator[KvShape]:
        """A token's entries in the KV cache, layer by layer. Layers that read another's K and V have none."""
        for layer in self.all_layers:
            for mixer in mixers(layer):
                if isinstance(mixer, AttentionSpec | LatentAttentionSpec) and mixer.cached is not None:
                    yield mixer.cached

    def windows(self) -> list[int | None]:
        """The sliding window of each cache group, the widest first: None sees all tokens.

        Attention mixers with the same window are one group. A model without attention has one group with empty blocks,
        which only name their tokens for the prefix cache.
        """
        found = {shape.window for shape in self.caches()} or {None}
        widths = sorted((window for window in found if window is not None), reverse=True)
        return [None, *widths] if None in found else [*widths]


def _is_for_towers(mixer: MixerSpec) -> bool:
    if isinstance(mixer, ExpertsSpec):
        return mixer.sum_bias
    if isinstance(mixer, AttentionSpec) and (mixer.bias_span is not None or mixer.disentangled is not None):
        return True
    return isinstance(mixer, AttentionSpec | MlpSpec) and mixer.clipped


def tensor_shapes(spec: DecoderSpec) -> Shapes:
    """The weights that `spec` needs: Tidewheel's name to shape, linear weights as `(out_features, in_features)`."""
    hidden, embedding = spec.hidden_size, spec.embedding
    shapes: Shapes = {"embed.weight": (spec.vocab_size, embedding.size)}
    if embedding.num_positions:
        shapes["embed.positions"] = (embedding.num_positions + embedding.position_offset, hidden)
    if embedding.size != hidden:
        shapes |= under("embed.project_in", linear(hidden, embedding.size, bias=False))
        shapes |= under("embed.project_out", linear(embedding.size, hidden, bias=False))
    if embedding.norm:
        shapes |= under("embed.norm", embedding.norm.shapes(hidden))
    if embedding.per_layer:
        shapes |= under("embed", embedding.per_layer.shapes(hidden, len(spec.layers)))
    if spec.streams:
        shapes |= spec.streams.shapes(hidden)
    for i, layer in enumerate(spec.layers):
        for residual in layer:
            shapes |= under(f"layers.{i}", residual.shapes(hidden))
    if spec.final_norm:
        shapes |= under("final_norm", spec.final_norm.shapes(hidden))
    if not spec.head.tied:
        shapes["head.weight"] = (spec.vocab_size, embedding.size)
    if spec.head.bias:
        shapes["head.bias"] = (spec.vocab_size,)
    if spec.mtp is not None:
        shapes |= under("mtp", spec.mtp.shapes(hidden))
    if spec.eagle3 is not None:
        shapes |= under("eagle3", spec.eagle3.shapes(hidden, spec.vocab_size))
    return shapes
