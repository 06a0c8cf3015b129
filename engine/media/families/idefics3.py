"""Idefics3 and SmolVLM (https://arxiv.org/abs/2504.05299): SigLIP over tiles, neighbouring patches joined."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Mapping
from typing import Any

import numpy as np

from ...devices.tower import Rows, TowerExecutor
from ...errors import ModelError
from ...models.config import ConfigReader
from ...models.module_tensors import in_places, module_tensors, norm_tables
from ...models.spec import NormSpec, ProjectionSpec, TowerSpec, tower_shapes
from ..media import Media
from ..picture import Picture
from ..processing import Patches, cut, joined_blocks, nearest, resize
from ..vision import Expansion, Vision
from .settings import HALF, LANCZOS, ProcessorSettings, decoder_size, part_of, require_patches, square
from .towers import MODULES, conv, embedded, even_segments, plain_layer, table_normalized

_MAX_EDGE = 4096  # pixels
_AROUND, _GLOBAL = "<fake_token_around_image>", "<global-img>"


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Idefics3Vision:
    """The vision of either."""
    return Idefics3Vision(architecture, config, processor)


class Idefics3Vision(Vision):
    """An image is resized to tiles of one size, row by row, and the whole image as the last of them.

    The layout is the rows and columns of tiles, 0 and 0 if the image is one tile.
    """

    placeholder = "<image>"
    slot = "<image>"
    request_fields = frozenset({"size", "do_image_splitting"})

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        settings, tower = ProcessorSettings(processor), part_of(config, "vision_config")
        hidden, patch = tower.integer("hidden_size", 1152), square(tower, "patch_size", 32)
        scale = ConfigReader(config).integer("scale_factor", 2)
        self._side = square(tower, "image_size", 224) // patch  # of the table of positions, in patches
        self._edge = settings.only_part("size", "longest_edge", 4 * 364)
        self._tile = settings.only_part("max_image_size", "longest_edge", 364)
        if self._edge > _MAX_EDGE:
            raise settings.error("size", f"a longest_edge of at most {_MAX_EDGE}")
        self._split = settings.flag("do_image_splitting", True)
        self._resample = settings.resample(LANCZOS)
        self._patches = Patches(settings.pixels(HALF, HALF), patch)
        self._grid, self._scale = self._tile // patch, scale
        if not self._side or not self._grid or self._grid % scale:
            raise ModelError(
                f"config.json: tiles of {self._tile} pixels must have a multiple of scale_factor {scale} patches of "
                f"{patch} along a side"
            )
        tiles = math.ceil(self._edge / self._tile) ** 2 + 1 if self._split else 1
        require_patches(tiles * self._grid**2, "an image of size.longest_edge")
        self.max_rows = self._grid**2
        self._norm = NormSpec("layer", tower.number("layer_norm_eps", 1e-6), bias=True)
        layer = plain_layer(
            tower.with_defaults(hidden_size=1152, num_attention_heads=16), "gelu_pytorch_tanh", self._norm.eps
        )
        self.spec = TowerSpec(
            hidden,
            (layer,) * tower.with_defaults(num_hidden_layers=12).num_layers("num_hidden_layers"),
            projections=(
                ("patches", ProjectionSpec(self._patches.inputs, hidden, bias=True)),
                ("connector", ProjectionSpec(hidden * scale**2, decoder_size(architecture, config))),
            ),
            tables=(("positions", (self._side**2, hidden)), *norm_tables("post_norm", self._norm, hidden)),
        )
        names = {
            **MODULES,
            **conv("vision_model.embeddings.patch_embedding"),
            "positions": "vision_model.embeddings.position_embedding.weight",
            "post_norm": "vision_model.post_layernorm",
            "connector": "connector.modality_projection.proj",
        }
        tensors = module_tensors(tower_shapes(self.spec), names, "vision_model.encoder.layers.")
        self.tensors = in_places(tensors, ("model.", ""))
        self.settings = ("idefics3", self._edge, self._tile, self._split, self._resample, self._patches.pixels)

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        if not self._split:
            picture = resize(picture, *self._longest(*picture.shape[:2]), self._resample)
            return (resize(picture, self._tile, self._tile, self._resample),), (0, 0)
        picture = resize(picture, *self._longest(*picture.shape[:2]), self._resample)
        picture = resize(picture, *self._whole_tiles(*picture.shape[:2]), self._resample)
        rows, columns = picture.shape[0] // self._tile, picture.shape[1] // self._tile
        if rows == columns == 1:
            return (picture,), (0, 0)
        whole = resize(picture, self._tile, self._tile, self._resample)
        return (*cut(picture, rows, columns), whole), (rows, columns)

    def _longest(self, height: int, width: int) -> tuple[int, int]:
        """The size with the longer side as the settings say, and the other one even."""
        ratio = width / height
        if width >= height:
            return _even(int(self._edge / ratio)), self._edge
        return self._edge, _even(int(self._edge * ratio))

    def _whole_tiles(self, height: int, width: int) -> tuple[int, int]:
        """The size up to whole tiles; first that of the longer side."""
        ratio, tile = width / height, self._tile
        if width >= height:
            width = math.ceil(width / tile) * tile
            return math.ceil(int(width / ratio) / tile) * tile, width
        height = math.ceil(height / tile) * tile
        return height, math.ceil(int(height * ratio) / tile) * tile

    def num_tokens(self, layout: Hashable) -> int:
        rows, columns = _tiles(layout)
        return (rows * columns + 1) * (self._grid // self._scale) ** 2

    def expansion(self, layout: Hashable) -> Expansion:
        rows, columns = _tiles(layout)
        text = "".join(
            "".join(f"{_AROUND}<row_{row}_col_{column}>{self.slot}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        text += ("\n" if rows else "") + f"{_AROUND}{_GLOBAL}{self.slot}{_AROUND}"
        return Expansion(text, ((self._grid // self._scale) ** 2,) * (rows * columns + 1))

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        places = nearest(self._side, self._grid)
        positions = tower.table("positions")[(places[:, None] * self._side + places).reshape(-1)]
        per_tile = len(positions)
        rows = yield from embedded(
            tower, self._patches, media.tiles, lambda start, stop: positions[np.arange(start, stop) % per_tile]
        )
        rows = yield from tower.layers(rows, even_segments(len(media.tiles), per_tile))
        rows = yield from table_normalized(tower, "post_norm", rows, self._norm)
        # Tiles lie below each other, so their blocks are those of one tall image.
        joined = joined_blocks(rows, (len(media.tiles) * self._grid, self._grid), self._scale)
        return (yield from tower.project("connector", joined))


def _tiles(layout: Hashable) -> tuple[int, int]:
    assert isinstance(layout, tuple)
    return layout[0], layout[1]


def _even(size: int) -> int:
    return max(size + size % 2, 1)
