"""Pixtral (https://arxiv.org/abs/2410.07073) and Mistral 3: images in their own aspect ratio, row by row."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Mapping
from typing import Any

import numpy as np

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.module_tensors import norm_tables
from ...models.spec import AttentionSpec, MlpSpec, NormSpec, ProjectionSpec, ResidualBlockSpec, TowerSpec
from ...models.text_part import text_part
from ..media import Media
from ..picture import Picture
from ..processing import Patches, block_places, joined_blocks, resize
from ..vision import Expansion, Vision
from .llava_parts import PROJECTOR, feature_layers, projector, tensors_of
from .settings import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    ProcessorSettings,
    decoder_size,
    head_dim_of,
    part_of,
    require_patches,
    square,
)
from .towers import axial_rope, conv, embedded, even_segments, table_normalized

_NORM = NormSpec("rms", 1e-5)
_MAX_MERGE = 16


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> PixtralVision:
    """The vision of Mistral 3."""
    part_of(config, "vision_config").refuse("model_type", "pixtral")
    return PixtralVision(architecture, config, processor)


class PixtralVision(Vision):
    """An image is shrunk to the longest edge, and its sides become multiples of what one embedding sees.

    The layout is the rows and columns of embeddings.
    """

    placeholder = "[IMG]"
    slot = "[IMG]"
    request_fields = frozenset({"size"})

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        tower, settings, whole = part_of(config, "vision_config"), ProcessorSettings(processor), ConfigReader(config)
        hidden, heads = tower.integer("hidden_size", 1024), tower.integer("num_attention_heads", 16)
        patch = square(tower, "patch_size", 16)
        merging = architecture == "Mistral3ForConditionalGeneration"
        self._merge = whole.integer("spatial_merge_size", 2) if merging else 1
        if self._merge > _MAX_MERGE:
            raise whole.error("spatial_merge_size", f"at most {_MAX_MERGE}")
        self._edge = settings.only_part("size", "longest_edge", 1024)
        self._block = patch * self._merge
        self.max_rows = (math.ceil(self._edge / self._block) * self._merge) ** 2
        require_patches(self.max_rows, "an image of size.longest_edge")
        settings.refuse("do_center_crop", False)
        self._resample = settings.resample(BICUBIC)
        self._patches = Patches(settings.pixels(CLIP_MEAN, CLIP_STD), patch)
        size = head_dim_of(tower, hidden, heads)
        rope = axial_rope(tower, size, alternating=True)
        attention = AttentionSpec(heads, heads, size, size**-0.5, rope=rope, two_way=True)
        mlp = MlpSpec(tower.integer("intermediate_size", 4096), tower.activation("hidden_act", "gelu"), gated=True)
        layer = (ResidualBlockSpec(attention, _NORM), ResidualBlockSpec(mlp, _NORM))
        depth = tower.with_defaults(num_hidden_layers=24).num_layers("num_hidden_layers")
        taken = feature_layers(whole, depth, -1 if merging else -2)
        if len(taken) > 1:
            raise whole.error("vision_feature_layer", "one number")
        if not merging and (whole.raw("vision_feature_select_strategy") or "default") != "full":
            raise whole.error("vision_feature_select_strategy", "full")
        projections = [("patches", ProjectionSpec(self._patches.inputs, hidden))]
        tables = norm_tables("pre_norm", _NORM, hidden)
        self._norm: NormSpec | None = None
        if merging:
            eps = ConfigReader(text_part(architecture, config), "config.json: text_config").number("rms_norm_eps", 1e-6)
            self._norm = NormSpec("rms", eps)
            projections.append(("blocks", ProjectionSpec(hidden * self._merge**2, hidden)))
            tables += norm_tables("merge_norm", self._norm, hidden)
        projections += projector(whole, hidden, decoder_size(architecture, config), bias=not merging)
        self.spec = TowerSpec(hidden, (layer,) * max(taken), tuple(projections), tables)
        names = {
            **conv("patch_conv"),
            **{part: f"attention.{part}_proj" for part in "qkvo"},
            **{part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            "attention_norm": "attention_norm",
            "mlp_norm": "ffn_norm",
            "pre_norm": "ln_pre",
        }
        of_projector = {**PROJECTOR, "merge_norm": "norm", "blocks": "patch_merger.merging_layer"}
        self.tensors = tensors_of(self.spec, names, "transformer.layers.", ("",), of_projector)
        self.settings = ("pixtral", self._edge, self._block, self._resample, self._patches.pixels)

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        height, width = picture.shape[:2]
        ratio = max(height / self._edge, width / self._edge)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise ValueError(
                f"an image of {picture.shape[1]} x {picture.shape[0]} pixels is too narrow: nothing of it is left when "
                f"its longer side is shrunk to {self._edge} pixels"
            )
        rows, columns = -(-height // self._block), -(-width // self._block)
        return (resize(picture, rows * self._block, columns * self._block, self._resample),), (rows, columns)

    def num_tokens(self, layout: Hashable) -> int:
        rows, columns = _grid(layout)
        return rows * columns

    def expansion(self, layout: Hashable) -> Expansion:
        rows, columns = _grid(layout)
        return Expansion(f"{self.slot}[IMG_BREAK]" * (rows - 1) + f"{self.slot}[IMG_END]", (columns,) * rows)

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        grid = self._patches.grid(media.tiles[0])
        rows = yield from embedded(tower, self._patches, media.tiles)
        rows = yield from table_normalized(tower, "pre_norm", rows, _NORM)
        segments, positions = even_segments(1, len(rows)), np.stack(block_places(*grid))
        for index in range(len(tower.spec.layers)):
            rows = yield from tower.layer(index, rows, segments, positions, in_place=True)
        if self._norm is not None:
            rows = yield from table_normalized(tower, "merge_norm", rows, self._norm)
            blocks = joined_blocks(rows, grid, self._merge).reshape(-1, self._merge**2, rows.shape[1])
            # A block is joined channel by channel, each with its patches side by side.
            channels = np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(len(blocks), -1)
            rows = yield from tower.project("blocks", channels)
        rows = yield from tower.project("merge", rows)
        return (yield from tower.project("connector", rows))


def _grid(layout: Hashable) -> tuple[int, int]:
    assert isinstance(layout, tuple)
    return layout[0], layout[1]
