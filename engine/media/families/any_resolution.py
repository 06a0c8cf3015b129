"""Images of any resolution, as LLaVA-NeXT has them (https://llava-vl.github.io/blog/2024-01-30-llava-next).

The whole image comes first, then tiles of it in one of several listed sizes, padded around. Features of the padding
are left out, and a learned row stands behind each row of the others.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from ...devices.tower import Rows
from ...models.config import ConfigReader
from ..media import Media
from ..picture import Picture
from ..processing import Pixels, cut, resize, resized_bilinear
from ..vision import Expansion, Vision
from .settings import BICUBIC, ProcessorSettings, require_patches, side, square
from .tile_tower import TileTower

NEXT_SIZES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_MAX_SIZES = 1024
_SHRINKS_FROM = 1.1

Sizes = tuple[tuple[int, int], ...]


class AnyResolution(NamedTuple):
    """Rows and columns of tiles, and how many rows and columns of their features, at either side, are of padding."""

    rows: int
    columns: int
    rows_of_padding: int
    columns_of_padding: int


class AnyResolutionVision(Vision):
    """An image as a square, and as tiles of the listed size that keeps most of its pixels and wastes least.

    Where the settings do not say it, `sizes` are listed, and tiles have `tile` pixels along a side. The features of a
    tile are `cells` x `cells`: by default, one for each patch. Those of more than `most` tiles shrink.
    """

    placeholder = "<image>"
    slot = "<image>"

    def __init__(
        self,
        settings: ProcessorSettings,
        whole: ConfigReader,
        pixels: Pixels,
        tower: TileTower,
        *,
        sizes: Sizes = NEXT_SIZES,
        tile: int = 224,
        cells: int | None = None,
        most: int | None = None,
    ) -> None:
        self._tower, self._patches, self._side = tower, tower.patches, tower.side
        if tower.tokens != tower.grid**2:
            raise whole.error("vision_feature_select_strategy", "default with a tower of CLIP")
        self._cells, self._most = cells or tower.grid, most
        self._read_side(settings, tile)
        self._sizes = self._listed(settings, sizes)
        if self._listed(whole, sizes) != self._sizes:
            raise settings.error("image_grid_pinpoints", "those of config.json")
        most_tiles = max(rows * columns for rows, columns in self._sizes) // self._side**2
        require_patches((most_tiles + 1) * tower.grid**2, "an image of image_grid_pinpoints")
        self.max_rows = tower.grid**2 + 1
        self._resample = settings.resample(BICUBIC)
        self.settings = ("llava-next", self._side, self._sizes, self._resample, most, self._cells, pixels)

    def _read_side(self, settings: ProcessorSettings, default: int) -> None:
        """Check that tiles are as large as the tower takes them, whichever way that is said."""
        size = settings.part("size")
        sides = [side(size, name) for name in ("height", "width", "shortest_edge") if size.raw(name) is not None]
        if settings.raw("crop_size") is not None and settings.flag("do_center_crop", default == 224):
            sides.append(square(settings, "crop_size"))
        if {*(sides or [default])} != {self._side}:
            raise settings.error("size", f"{self._side}, the image_size of vision_config in config.json")

    def _listed(self, config: ConfigReader, default: Sizes) -> Sizes:
        value = config.raw("image_grid_pinpoints")
        if value is None:
            return default
        if (
            not isinstance(value, list | tuple)
            or not 0 < len(value) <= _MAX_SIZES
            or not all(isinstance(size, list | tuple) and len(size) == 2 for size in value)
            or not all(type(edge) is int and edge > 0 and edge % self._side == 0 for size in value for edge in size)
        ):
            raise config.error("image_grid_pinpoints", f"a list of heights and widths, multiples of {self._side}")
        return tuple((size[0], size[1]) for size in value)

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        height, width = picture.shape[:2]
        full_height, full_width = self._best(height, width)
        wide, high = full_width / width, full_height / height
        if wide < high:
            inner = min(math.ceil(height * wide), full_height), full_width
        else:
            inner = full_height, min(math.ceil(width * high), full_width)
        padded = np.zeros((full_height, full_width, 3), np.uint8)
        top, left = (full_height - inner[0]) // 2, (full_width - inner[1]) // 2
        padded[top : top + inner[0], left : left + inner[1]] = resize(picture, *inner, self._resample).pixels
        rows, columns = full_height // self._side, full_width // self._side
        whole = resize(picture, self._side, self._side, self._resample)
        return (whole, *cut(Picture(padded), rows, columns)), self._layout(height, width, rows, columns)

    def _best(self, height: int, width: int) -> tuple[int, int]:
        """The listed size that keeps most of the image's pixels, of several the one that wastes least."""

        def kept(size: tuple[int, int]) -> tuple[int, int]:
            scale = min(size[1] / width, size[0] / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            return pixels, pixels - size[0] * size[1]

        best = max(self._sizes, key=kept)
        if not kept(best)[0]:
            raise ValueError(f"an image of {width} x {height} pixels is too narrow: nothing of it is left in any tile")
        return best

    def _layout(self, height: int, width: int, rows: int, columns: int) -> AnyResolution:
        cells = self._cells
        high, wide = rows * cells, columns * cells
        if width / height > wide / high:
            return AnyResolution(rows, columns, (high - int(round(height * (wide / width), 7))) // 2, 0)
        return AnyResolution(rows, columns, 0, (wide - int(round(width * (high / height), 7))) // 2)

    def _grid(self, layout: Hashable) -> tuple[int, int]:
        """Rows and columns of the features of the tiles, as they are in the end."""
        assert isinstance(layout, AnyResolution)
        cells = self._cells
        rows = layout.rows * cells - 2 * layout.rows_of_padding
        columns = layout.columns * cells - 2 * layout.columns_of_padding
        if self._most is not None:
            ratio = math.sqrt(rows * columns / (self._most * cells**2))
            if ratio > _SHRINKS_FROM:
                return int(rows // ratio), int(columns // ratio)
        return rows, columns

    def num_tokens(self, layout: Hashable) -> int:
        rows, columns = self._grid(layout)
        return self._cells**2 + rows * (columns + 1)

    def expansion(self, layout: Hashable) -> Expansion:
        return Expansion(self.slot, (self.num_tokens(layout),))

    def _packed(self, media: Media, features: Rows, newline: Rows) -> Rows:
        """The image's rows of the features of all its tiles, `[tiles * cells * cells, width]`."""
        layout = media.layout
        assert isinstance(layout, AnyResolution)
        cells, width = self._cells, features.shape[1]
        whole, tiles = features[: cells**2], features[cells**2 :]
        tiles = tiles.reshape(layout.rows, layout.columns, cells, cells, width).transpose(0, 2, 1, 3, 4)
        plane = tiles.reshape(layout.rows * cells, layout.columns * cells, width)
        top, left = layout.rows_of_padding, layout.columns_of_padding
        plane = plane[top : len(plane) - top, left : plane.shape[1] - left]
        rows, columns = self._grid(layout)
        if (rows, columns) != plane.shape[:2]:
            plane = resized_bilinear(plane, rows, columns)
        newlines = np.broadcast_to(newline, (rows, 1, width))
        return np.concatenate([whole, np.concatenate([plane, newlines], axis=1).reshape(-1, width)])
