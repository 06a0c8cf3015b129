"""Llama 4 (https://ai.meta.com/blog/llama-4-multimodal-intelligence/): tiles of a canvas that distorts nothing.

Its processor in transformers resizes with torchvision, whose levels differ from Pillow's by one here and there.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...devices.tower import Rows, TowerExecutor
from ...models.module_tensors import in_places, module_tensors, norm_tables
from ...models.spec import AttentionSpec, MlpSpec, NormSpec, ProjectionSpec, ResidualBlockSpec, TowerSpec, tower_shapes
from ..media import Media
from ..picture import Picture
from ..processing import Patches, arrangements, block_places, cut, joined_blocks, padded_behind, resize
from ..vision import Expansion, Vision
from .settings import (
    BILINEAR,
    HALF,
    ProcessorSettings,
    decoder_size,
    head_dim_of,
    part_of,
    require_patches,
    require_size,
    square,
)
from .towers import axial_rope, embedded_behind_class, even_segments, table_normalized, without_class

_MAX_TILES = 256
_NORM = NormSpec("layer", 1e-5, bias=True)  # of all of them; configs say other numbers, which are not used


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Llama4Vision:
    """The vision of Llama 4."""
    return Llama4Vision(architecture, config, processor)


class Llama4Vision(Vision):
    """An image is resized in its ratio, padded with black to whole tiles, and cut. It is there as a whole too.

    The layout is the rows and columns of tiles. The class embedding comes behind a tile's patches.
    """

    placeholder = "<|image|>"
    slot = "<|patch|>"
    request_fields = frozenset({"max_patches", "resize_to_max_canvas"})

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        tower, settings = part_of(config, "vision_config"), ProcessorSettings(processor)
        hidden, heads = tower.integer("hidden_size", 768), tower.integer("num_attention_heads", 16)
        patch, self._side = square(tower, "patch_size", 14), square(tower, "image_size", 448)
        require_size(settings, self._side, 336)
        self._grid = self._side // patch
        ratio = tower.number("pixel_shuffle_ratio", 0.5)
        self._merge = round(1 / ratio)
        if not self._grid or self._merge * ratio != 1 or self._grid % self._merge:
            raise tower.error("pixel_shuffle_ratio", f"1 / n, with a number n that divides {self._grid} patches")
        self._tokens = (self._grid // self._merge) ** 2
        most = settings.integer("max_patches", 16)
        if most > _MAX_TILES:
            raise settings.error("max_patches", f"at most {_MAX_TILES}")
        require_patches((most + 1) * self._grid**2, "an image of max_patches tiles")
        self.max_rows = self._grid**2 + 1
        self._arrangements = arrangements(1, most)
        self._fills = settings.flag("resize_to_max_canvas", False)
        self._resample = settings.resample(BILINEAR)
        # The processor computes in bfloat16, as the original model does.
        self._patches = Patches(replace(settings.pixels(HALF, HALF), bfloat16=True), patch)
        width = head_dim_of(tower, hidden, heads)
        rope = replace(axial_rope(tower, width), interleaved=True)
        attention = AttentionSpec(
            heads, heads, width, width**-0.5, qkv_bias=True, out_bias=True, rope=rope, two_way=True
        )
        mlp = MlpSpec(tower.integer("intermediate_size", 5632), "gelu", gated=False, bias=True)
        joined, inner = hidden * self._merge**2, tower.integer("projector_input_dim", 4096)
        for name, ours, default in (
            ("intermediate_size", joined, 5632),
            ("projector_output_dim", inner, 4096),
            ("vision_output_dim", inner, 7680),
        ):
            if tower.integer(name, default) != ours:
                raise tower.error(name, f"{ours}, as the config's other sizes demand")
        self.spec = TowerSpec(
            hidden,
            ((ResidualBlockSpec(attention, _NORM), ResidualBlockSpec(mlp, _NORM)),)
            * tower.with_defaults(num_hidden_layers=34).num_layers("num_hidden_layers"),
            projections=(
                ("patches", ProjectionSpec(self._patches.inputs, hidden)),
                ("merge", ProjectionSpec(joined, inner, activation="gelu")),
                ("adapter", ProjectionSpec(inner, inner, activation="gelu")),
                ("connector", ProjectionSpec(inner, decoder_size(architecture, config))),
            ),
            tables=(
                ("positions", (self._grid**2 + 1, hidden)),
                ("class", (hidden,)),
                *norm_tables("pre_norm", _NORM, hidden),
                *norm_tables("post_norm", _NORM, hidden),
            ),
        )
        names = {
            "patches": "vision_model.patch_embedding.linear",
            "positions": "vision_model.positional_embedding_vlm",
            "class": "vision_model.class_embedding",
            "pre_norm": "vision_model.layernorm_pre",
            "post_norm": "vision_model.layernorm_post",
            **{part: f"self_attn.{part}_proj" for part in "qkvo"},
            "up": "mlp.fc1",
            "down": "mlp.fc2",
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "merge": "vision_model.vision_adapter.mlp.fc1",
            "adapter": "vision_model.vision_adapter.mlp.fc2",
            "connector": "multi_modal_projector.linear_1",
        }
        tensors = module_tensors(tower_shapes(self.spec), names, "vision_model.model.layers.")
        self.tensors = in_places(tensors, ("", "model."))
        self.settings = ("llama4", self._side, most, self._fills, self._resample, self._patches.pixels)

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        height, width = picture.shape[:2]
        rows, columns = self._canvas(height, width)
        size = self._undistorted(height, width, rows, columns)
        resized = resize(picture, *size, self._resample)
        tiles = cut(padded_behind(resized, rows * self._side, columns * self._side), rows, columns)
        if len(tiles) > 1:
            tiles += (resize(picture, self._side, self._side, self._resample),)
        return tiles, (rows, columns)

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles that enlarge the image least, or else shrink it least; of equal ones the smallest.

        In float32, as transformers computes them.
        """
        scales: dict[tuple[int, int], np.float32] = {}
        for columns, rows in self._arrangements:
            of_sides = (np.float32(n * self._side) / np.float32(size) for n, size in ((rows, height), (columns, width)))
            scales[rows, columns] = min(of_sides)
        enlarging = [scale for scale in scales.values() if scale >= 1]
        if enlarging:
            wanted = max(enlarging) if self._fills else min(enlarging)
        else:
            wanted = max(scales.values())
        return min((canvas for canvas, scale in scales.items() if scale == wanted), key=lambda one: one[0] * one[1])

    def _undistorted(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """The image's size on that canvas. It is not enlarged beyond one tile, unless it should fill the canvas.

        transformers computes with the canvas's sides in float32, and with others in float64.
        """
        limits: list[tuple[int, Any]] = []
        for size, canvas in ((height, rows * self._side), (width, columns * self._side)):
            wanted = max(size, self._side)
            limits.append((canvas, np.float32(canvas)) if self._fills or canvas < wanted else (wanted, wanted))
        (most_rows, exact_rows), (most_columns, exact_columns) = limits
        by_row, by_column = exact_rows / height, exact_columns / width
        if by_column < by_row:
            return max(min(math.floor(height * by_column), most_rows), 1), most_columns
        return most_rows, max(min(math.floor(width * by_row), most_columns), 1)

    def num_tokens(self, layout: Hashable) -> int:
        return sum(self.expansion(layout).counts)

    def expansion(self, layout: Hashable) -> Expansion:
        assert isinstance(layout, tuple)
        rows, columns = layout
        text, tiles = f"<|image|>{self.slot}", 1
        if rows * columns > 1:
            row = "<|tile_x_separator|>".join([self.slot] * columns) + "<|tile_y_separator|>"
            text, tiles = row * rows + text, rows * columns + 1
        return Expansion(f"<|image_start|>{text}<|image_end|>", (self._tokens,) * tiles)

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        tiles = len(media.tiles)
        rows_of, columns_of = block_places(self._grid, self._grid)
        # The class embedding is not rotated; patches count from 1.
        places = np.stack([np.append(of_axis + 1, 0) for of_axis in (columns_of, rows_of)]).astype(np.int32)
        rows = yield from embedded_behind_class(tower, self._patches, media.tiles, last=True)
        rows = yield from table_normalized(tower, "pre_norm", rows, _NORM)
        rows = yield from tower.layers(rows, even_segments(tiles, self.max_rows), np.tile(places, tiles))
        rows = yield from table_normalized(tower, "post_norm", rows, _NORM)
        # Tiles lie below each other, so their blocks are those of one tall image.
        patches = without_class(rows, tiles, last=True)
        rows = yield from tower.project("merge", joined_blocks(patches, (tiles * self._grid, self._grid), self._merge))
        rows = yield from tower.project("adapter", rows)
        return (yield from tower.project("connector", rows))
