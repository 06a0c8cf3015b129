"""Stages: a decoder's layers in contiguous runs, each computed in a place of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from .attention import AttentionSpec
from .decoder import DecoderSpec, tensor_shapes
from .layers import mixers

_LAYER = re.compile(r"layers\.(\d+)\.")
_OF_HEAD = ("final", "head.", "embed.project_out.", "mtp.")
_LOOKED_UP = ("embed.weight", "embed.positions", "embed.per_layer")


class StageSpec(Struct, frozen=True):
    """Layers `[begin, end)` of `num_layers`. The first stage embeds, the last one has the final norm and the head, and
    behind them a layer for drafts.
    """

    begin: int
    end: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        """Whether it embeds."""
        return self.begin == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives logits."""
        return self.end == self.num_layers

    def __str__(self) -> str:
        last = self.end - 1
        return f"layer {last}" if self.begin == last else f"layers {self.begin}-{last}"


def stage_tensors(spec: DecoderSpec, stage: StageSpec) -> list[str]:
    """The names of the weights that a stage computes with. An embedding that is tied, or that a layer for drafts has in
    common with the model, is of the first stage and of the last.
    """
    return [name for name in tensor_shapes(spec) if stage_has(spec, stage, name)]


def layer_bytes_of(spec: DecoderSpec, sizes: Mapping[str, int]) -> list[int]:
    """The `sizes` of tensors that a step reads as a whole, summed by layer.

    Tables that are looked up are left out. The head counts as the last layer's.
    """
    read = [0] * len(spec.layers)
    for name, size in sizes.items():
        if (layer := _LAYER.match(name)) is not None:
            read[int(layer[1])] += size
        elif name.startswith(_OF_HEAD) or (name == "embed.weight" and spec.head.tied):
            read[-1] += size
        elif name not in _LOOKED_UP:
            read[0] += size
    return read


def held_bytes_of(spec: DecoderSpec, sizes: Mapping[str, int]) -> list[int]:
    """The `sizes` of tensors that several stages hold in memory, summed by layer.

    Other tensors of the first stage count as the first layer's, and other tensors of the last stage as the last's.
    """
    held = [0] * len(spec.layers)
    for name, size in sizes.items():
        if (layer := _LAYER.match(name)) is not None:
            held[int(layer[1])] += size
            continue
        if not name.startswith(_OF_HEAD):
            held[0] += size
        if name.startswith(_OF_HEAD) or (name == "embed.weight" and _last_embeds(spec)):
            held[-1] += size
    return held


def stage_has(spec: DecoderSpec, stage: StageSpec, name: str) -> bool:
    """Whether a stage computes with a weight of that name: see `stage_tensors`."""
    if (layer := _LAYER.match(name)) is not None:
        return stage.begin <= int(layer[1]) < stage.end
    if name == "embed.weight":
        return stage.is_first or (stage.is_last and _last_embeds(spec))
    return stage.is_last if name.startswith(_OF_HEAD) else stage.is_first


def _last_embeds(spec: DecoderSpec) -> bool:
    return spec.head.tied or spec.mtp is not None


def stage_cuts(spec: DecoderSpec) -> list[int]:
    """The layers at which a later stage may begin: no layer from there on reads the K and V of a layer before."""
    last_reader: dict[int, int] = {}
    for index, layer in enumerate(spec.layers):
        for mixer in mixers(layer):
            if isinstance(mixer, AttentionSpec) and mixer.kv_layer is not None:
                last_reader[mixer.kv_layer] = index
    return [
        cut
        for cut in range(1, len(spec.layers))
        if not any(written < cut <= read for written, read in last_reader.items())
    ]


def stage_row_floats(spec: DecoderSpec) -> int:
    """How many numbers one token takes between two stages: its hidden states, and the layers' inputs for it."""
    per_layer = 0 if spec.embedding.per_layer is None else len(spec.layers) * spec.embedding.per_layer.size
    return spec.hidden_size * (1 if spec.streams is None else spec.streams.count) + per_layer
