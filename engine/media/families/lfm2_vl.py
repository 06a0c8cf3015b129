"""LFM2-VL (https://huggingface.co/LiquidAI/LFM2-VL-1.6B): SigLIP 2 over an image of any ratio, or over tiles of it.

Its processor in transformers resizes with torchvision, whose levels differ from Pillow's by one here and there.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.module_tensors import norm_tables
from ...models.spec import NormSpec, ProjectionSpec, TowerSpec
from ..media import Media
from ..picture import Picture
from ..processing import Patches, antialiased, arrangements, cut, joined_blocks, nearest_arrangement, resize
from ..vision import Expansion, Vision
from .llava_parts import PROJECTOR, tensors_of
from .settings import (
    BILINEAR,
    HALF,
    ProcessorSettings,
    decoder_size,
    part_of,
    require_entries,
    require_patches,
    rows_of_blocks,
    side,
    square,
)
from .towers import MODULES, embedded, plain_layer, table_normalized

_MAX_TILES = 256
_MAX_FACTOR = 16


class Lfm2Layout(NamedTuple):
    """Rows and columns of tiles, 1 and 1 for the image alone, and rows and columns of embeddings of the whole image."""

    rows: int
    columns: int
    whole_rows: int
    whole_columns: int


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Lfm2Vision:
    """The vision of LFM2-VL."""
    return Lfm2Vision(architecture, config, processor)


class Lfm2Vision(Vision):
    """A small image keeps its ratio. A large one is stretched to tiles, row by row, and is there as a whole too."""

    placeholder = "<image>"
    slot = "<image>"
    request_fields = frozenset({"min_image_tokens", "max_image_tokens", "min_tiles", "max_tiles", "do_image_splitting"})

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        tower, settings, whole = part_of(config, "vision_config"), ProcessorSettings(processor), ConfigReader(config)
        hidden, patch = tower.integer("hidden_size", 768), square(tower, "patch_size", 16)
        self._merge = whole.integer("downsample_factor", 2)
        for name, ours, default in (("encoder_patch_size", patch, 16), ("downsample_factor", self._merge, 2)):
            if settings.integer(name, default) != ours or self._merge > _MAX_FACTOR:
                raise settings.error(name, f"{ours}, as config.json has it, and no factor above {_MAX_FACTOR}")
        self._block = patch * self._merge
        self._least, self._most = settings.integer("min_image_tokens", 64), settings.integer("max_image_tokens", 256)
        self._tolerance = settings.number("max_pixels_tolerance", 2.0)
        self._tile = side(settings, "tile_size", 512)
        splits = settings.flag("do_image_splitting", True)
        fewest, most = settings.integer("min_tiles", 2), settings.integer("max_tiles", 10)
        if self._tile % self._block:
            raise settings.error("tile_size", f"a multiple of {self._block} pixels")
        if not fewest <= most <= _MAX_TILES:
            raise settings.error("max_tiles", f"from min_tiles to {_MAX_TILES}")
        if splits and fewest == 1 < most:
            raise settings.error("min_tiles", "at least 2")
        if self._least > self._most:
            raise settings.error("min_image_tokens", "at most max_image_tokens")
        self._arrangements = arrangements(fewest, most) if splits and most > 1 else ()
        self._thumbnail = settings.flag("use_thumbnail", True)
        in_tile = (self._tile // patch) ** 2 if splits else 0
        self._most_patches = max(self._most * self._merge**2, in_tile)
        require_patches(most * in_tile + self._most_patches, "an image of max_tiles")
        self.max_rows = max(rows_of_blocks(self._most, self._merge), in_tile)
        self._resample = settings.resample(BILINEAR)
        self._patches = Patches(settings.pixels(HALF, HALF), patch, colours_last=True)
        entries = tower.integer("num_patches", 256)
        self._side = math.isqrt(entries)
        require_entries(tower, "num_patches", self._side if self._side**2 == entries else 0)
        self._norm = NormSpec("layer", tower.number("layer_norm_eps", 1e-6), bias=True)
        joined, inner = hidden * self._merge**2, whole.integer("projector_hidden_size", 2560)
        bias, act = whole.flag("projector_bias", True), whole.activation("projector_hidden_act", "gelu")
        norm = NormSpec("layer", 1e-5, bias=True) if whole.flag("projector_use_layernorm", True) else None
        self.spec = TowerSpec(
            hidden,
            (plain_layer(tower, "gelu_pytorch_tanh", 1e-6),)
            * tower.with_defaults(num_hidden_layers=12).num_layers("num_hidden_layers"),
            projections=(
                ("patches", ProjectionSpec(self._patches.inputs, hidden, bias=True)),
                ("merge", ProjectionSpec(joined, inner, bias=bias, norm=norm, activation=act)),
                ("connector", ProjectionSpec(inner, decoder_size(architecture, config), bias=bias)),
            ),
            tables=(("positions", (entries, hidden)), *norm_tables("post_norm", self._norm, hidden)),
        )
        names = {
            **MODULES,
            "patches": "embeddings.patch_embedding",
            "positions": "embeddings.position_embedding.weight",
            "post_norm": "post_layernorm",
        }
        of_projector = {**PROJECTOR, "merge.norm": "layer_norm"}
        self.tensors = tensors_of(self.spec, names, "encoder.layers.", ("vision_model.", ""), of_projector)
        self.settings = (
            "lfm2-vl",
            *(self._block, self._least, self._most, self._tolerance, self._tile, self._arrangements),
            *(self._thumbnail, self._resample, self._patches.pixels),
        )

    def fields_of_tokens(self, least: int | None, most: int | None) -> Mapping[str, Any]:
        most = max(self._most, least or 0) if most is None else most
        return {"min_image_tokens": min(self._least, most) if least is None else least, "max_image_tokens": most}

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        height, width = picture.shape[:2]
        size = self._size(height, width)
        whole = size[0] // self._block, size[1] // self._block
        if not self._arrangements or not self._is_large(height, width):
            return (resize(picture, *size, self._resample),), Lfm2Layout(1, 1, *whole)
        columns, rows = nearest_arrangement(self._arrangements, height, width, self._tile)
        tiles = cut(resize(picture, rows * self._tile, columns * self._tile, self._resample), rows, columns)
        thumbnail = (resize(picture, *size, self._resample),) if self._thumbnail else ()
        return tiles + thumbnail, Lfm2Layout(rows, columns, *whole)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """The sides as multiples of what one embedding sees, half to even, and the area within its bounds."""
        block, area = self._block, self._block**2
        rows, columns = (max(block, round(size / block) * block) for size in (height, width))
        if rows * columns > self._most * area:
            by = math.sqrt(height * width / (self._most * area))
            rows, columns = (max(block, math.floor(size / by / block) * block) for size in (height, width))
        elif rows * columns < self._least * area:
            by = math.sqrt(self._least * area / (height * width))
            rows, columns = (math.ceil(size * by / block) * block for size in (height, width))
        if rows * columns > self._most_patches * self._patches.size**2:
            raise ValueError(f"an image of {width} x {height} pixels is too narrow for this model")
        return rows, columns

    def _is_large(self, height: int, width: int) -> bool:
        rows, columns = (max(self._patches.size, round(size / self._block) * self._block) for size in (height, width))
        return rows * columns > self._most * self._block**2 * self._tolerance

    def _counts(self, layout: Hashable) -> tuple[int, ...]:
        assert isinstance(layout, Lfm2Layout)
        whole = layout.whole_rows * layout.whole_columns
        tiles = layout.rows * layout.columns
        if tiles == 1:
            return (whole,)
        return ((self._tile // self._block) ** 2,) * tiles + ((whole,) if self._thumbnail else ())

    def num_tokens(self, layout: Hashable) -> int:
        return sum(self._counts(layout))

    def expansion(self, layout: Hashable) -> Expansion:
        assert isinstance(layout, Lfm2Layout)
        text = self.slot
        if layout.rows * layout.columns > 1:
            places = [(row + 1, column + 1) for row in range(layout.rows) for column in range(layout.columns)]
            text = "".join(f"<|img_row_{row}_col_{column}|>{self.slot}" for row, column in places)
            text += f"<|img_thumbnail|>{self.slot}" if self._thumbnail else ""
        return Expansion(f"<|image_start|>{text}<|image_end|>", self._counts(layout))

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        table, embeddings = tower.table("positions"), []
        grids = [self._patches.grid(tile) for tile in media.tiles]
        positions = {grid: antialiased(table, self._side, grid) for grid in set(grids)}
        rows = yield from embedded(tower, self._patches, media.tiles)
        rows += np.concatenate([positions[grid] for grid in grids])
        bounds = np.cumsum([0, *(height * width for height, width in grids)]).astype(np.int32)
        rows = yield from tower.layers(rows, bounds)
        rows = yield from table_normalized(tower, "post_norm", rows, self._norm)
        for grid, start, stop in zip(grids, bounds[:-1], bounds[1:], strict=True):
            embeddings.append(joined_blocks(rows[start:stop], grid, self._merge))
        rows = yield from tower.project("merge", np.concatenate(embeddings))
        return (yield from tower.project("connector", rows))
