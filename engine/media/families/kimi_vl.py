"""Kimi-VL (https://arxiv.org/abs/2504.07491): MoonViT over the whole image, its blocks of patches joined."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Mapping
from typing import Any

import numpy as np

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.module_tensors import in_places, module_tensors, norm_tables
from ...models.spec import AttentionSpec, MlpSpec, NormSpec, ProjectionSpec, ResidualBlockSpec, TowerSpec, tower_shapes
from ...models.tensor_ref import TensorRef
from ..media import Media
from ..picture import Picture
from ..processing import Patches, bicubic, block_places, joined_blocks, resize
from ..vision import Expansion, Vision
from .qwen_vl import grid_of
from .settings import (
    BICUBIC,
    HALF,
    ProcessorSettings,
    decoder_size,
    head_dim_of,
    part_of,
    require_entries,
    require_patches,
    square,
)
from .towers import axial_rope, conv, embedded, even_segments, in_pieces, table_normalized

_NORM = NormSpec("layer", 1e-5, bias=True)
_MAX_SIDE = 511  # patches
_MAX_MERGE = 16
_MAX_ROWS = 2**20  # of q in all layers, each of which has a number in `_halved`


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> KimiVision:
    """The vision of Kimi-VL."""
    return KimiVision(architecture, config, processor)


class KimiVision(Vision):
    """An image keeps its size, or shrinks to a number of patches, and is padded with black at the right and below.

    The layout is the rows and columns of patches.
    """

    placeholder = "<|media_pad|>"
    slot = "<|media_pad|>"

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        tower, settings = part_of(config, "vision_config"), ProcessorSettings(processor)
        hidden, heads = tower.integer("hidden_size", 1152), tower.integer("num_attention_heads", 16)
        patch = square(tower, "patch_size", 14)
        self._merge = _merge_of(tower)
        if settings.integer("patch_size", 14) != patch:
            raise settings.error("patch_size", f"{patch}, as the vision_config of config.json has it")
        if _merge_of(settings) != self._merge:
            raise settings.error("merge_kernel_size", f"[{self._merge}, {self._merge}], as config.json has it")
        if not settings.flag("pad_input", False):
            raise settings.error("pad_input", "true: images that are cropped instead may not fit into blocks")
        self._block = patch * self._merge
        self._most = settings.integer("in_token_limit", 4096)
        require_patches(self._most, "an image of in_token_limit")
        self.max_rows = self._most + 2 * self._merge * (_MAX_SIDE + self._merge)
        self._patches = Patches(settings.pixels(HALF, HALF), patch)
        self._side = tower.integer("init_pos_emb_height", 64)
        require_entries(tower, "init_pos_emb_height", self._side)
        if tower.integer("init_pos_emb_width", 64) != self._side:
            raise tower.error("init_pos_emb_width", f"{self._side}, as init_pos_emb_height")
        size = head_dim_of(tower, hidden, heads)
        rope = axial_rope(tower, size)
        attention = AttentionSpec(heads, heads, size, size**-0.5, qkv_bias=True, out_bias=True, rope=rope, two_way=True)
        mlp = MlpSpec(tower.integer("intermediate_size", 4304), "gelu_tanh", gated=False, bias=True)
        depth = tower.with_defaults(num_hidden_layers=27).num_layers("num_hidden_layers")
        if hidden * depth > _MAX_ROWS:
            raise tower.error("num_hidden_layers", f"at most {_MAX_ROWS // hidden} with a hidden_size of {hidden}")
        joined = hidden * self._merge**2
        self.spec = TowerSpec(
            hidden,
            ((ResidualBlockSpec(attention, _NORM), ResidualBlockSpec(mlp, _NORM)),) * depth,
            (
                ("patches", ProjectionSpec(self._patches.inputs, hidden, bias=True)),
                ("merge", ProjectionSpec(joined, joined, bias=True, activation="gelu")),
                ("connector", ProjectionSpec(joined, decoder_size(architecture, config), bias=True)),
            ),
            (
                ("positions", (self._side, self._side * hidden)),
                *norm_tables("post_norm", _NORM, hidden),
                *norm_tables("merge_norm", _NORM, hidden),
            ),
        )
        names: dict[str, str | TensorRef] = {
            **conv("patch_embed.proj"),
            **_halved("wqkv", heads, size),
            "v": TensorRef("wqkv", rows=(2 * hidden, 3 * hidden)),
            "o": "wo",
            "up": "mlp.fc0",
            "down": "mlp.fc1",
            "attention_norm": "norm0",
            "mlp_norm": "norm1",
            "positions": TensorRef("patch_embed.pos_emb.weight", matrix=True),
            "post_norm": "encoder.final_layernorm",
        }
        of_projector = {"merge_norm": "pre_norm", "merge": "linear_1", "connector": "linear_2"}
        shapes = tower_shapes(self.spec)
        projector = [name for name in shapes if name.startswith(tuple(f"{module}." for module in of_projector))]
        tensors = module_tensors([name for name in shapes if name not in projector], names, "encoder.blocks.")
        self.tensors = {
            **in_places(tensors, ("vision_tower.",)),
            **in_places(module_tensors(projector, of_projector), ("multi_modal_projector.",)),
        }
        self.settings = ("kimi-vl", self._block, self._most, self._patches.pixels)

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        height, width = picture.shape[:2]
        patch = self._patches.size
        patches = (width // patch) * (height // patch)
        if patches > self._most:
            scale = math.sqrt(self._most / patches)
            height, width = int(height * scale), int(width * scale)
        rows, columns = (-(-size // self._block) * self._merge for size in (height, width))
        if max(rows, columns) > _MAX_SIDE or rows * columns > self.max_rows or not min(height, width):
            raise ValueError(
                f"an image of {picture.shape[1]} x {picture.shape[0]} pixels is too narrow: this model takes at most "
                f"{_MAX_SIDE} patches of {patch} pixels along a side"
            )
        tile = np.zeros((rows * patch, columns * patch, 3), np.uint8)
        if patches > self._most:
            picture = resize(picture, height, width, BICUBIC)
        tile[:height, :width] = picture.pixels
        return (Picture(tile),), (rows, columns)

    def num_tokens(self, layout: Hashable) -> int:
        rows, columns = grid_of(layout)
        return rows * columns // self._merge**2

    def expansion(self, layout: Hashable) -> Expansion:
        return Expansion(self.slot, (self.num_tokens(layout),))

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        grid, places = grid_of(media.layout), block_places(*grid_of(media.layout))
        table = tower.table("positions").reshape(self._side**2, -1)

        def placed(start: int, piece: Rows) -> Rows:
            of_rows, of_columns = (of_axis[start : start + len(piece)] for of_axis in places)
            return piece + bicubic(table, self._side, of_rows, of_columns, grid)

        rows = yield from embedded(tower, self._patches, media.tiles)
        rows = yield from in_pieces(rows, placed)
        rows = yield from tower.layers(rows, even_segments(1, len(rows)), np.stack(places))
        rows = yield from table_normalized(tower, "post_norm", rows, _NORM)
        rows = yield from table_normalized(tower, "merge_norm", rows, _NORM)
        rows = yield from tower.project("merge", joined_blocks(rows, grid, self._merge))
        return (yield from tower.project("connector", rows))


def _merge_of(config: ConfigReader) -> int:
    value = config.raw("merge_kernel_size")
    value = [2, 2] if value is None else value
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or value[0] != value[1]
        or type(value[0]) is not int
        or not 0 < value[0] <= _MAX_MERGE
    ):
        raise config.error("merge_kernel_size", f"two equal numbers from 1 to {_MAX_MERGE}")
    return value[0]


def _halved(name: str, heads: int, size: int) -> dict[str, TensorRef]:
    """q and k with the halves of their pairs apart, of a matrix in which they lie side by side.

    A head's pairs turn by column and by row in turns there; here all by row come first.
    """
    pairs = [*range(1, size // 2, 2), *range(0, size // 2, 2)]
    order = [2 * pair for pair in pairs] + [2 * pair + 1 for pair in pairs]
    rows = tuple(head * size + row for head in range(heads) for row in order)
    return {
        part: TensorRef(name, rows=(i * len(rows), (i + 1) * len(rows)), permute=rows)
        for i, part in enumerate(("q", "k"))
    }
