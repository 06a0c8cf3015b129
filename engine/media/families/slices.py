"""Images in slices, as MiniCPM-V has them (https://github.com/OpenBMB/MiniCPM-V): an overview, and parts of it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

from ..picture import Picture
from ..processing import MAX_PATCHES, Patches, Pixels, cut, require_ratio, resize
from ..vision import Expansion, Vision
from .settings import BICUBIC, ProcessorSettings, require_patches, rows_of_blocks, side

_MAX_SLICES = 256

Grid = tuple[int, int]  # rows and columns


class Slices(NamedTuple):
    """Rows and columns of slices, 0 and 0 without any, and of the patches of the overview and of the last tile."""

    rows: int
    columns: int
    overview: Grid
    last: Grid


class SlicedVision(Vision):
    """A small image keeps its ratio. Of a large one there is an overview, and slices of it in full detail, row by row.

    The sides of either are whole blocks of `merge` x `merge` patches.
    """

    def __init__(self, settings: ProcessorSettings, pixels: Pixels, patch: int, merge: int, *, numbers: bool) -> None:
        if settings.integer("patch_size", 14) != patch:
            raise settings.error("patch_size", f"{patch}, as the vision_config of config.json has it")
        self._merge, self._block = merge, patch * merge
        self._slice = side(settings, "scale_resolution", 448)
        most = settings.integer("max_slice_nums", 9)
        if most > _MAX_SLICES:
            raise settings.error("max_slice_nums", f"at most {_MAX_SLICES}")
        self._most = most if settings.flag("slice_mode", True) else 1
        self.max_rows = rows_of_blocks(math.ceil(self._slice / self._block) ** 2, merge)
        require_patches((self._most + 1) * (self._slice // patch) ** 2, "an image of max_slice_nums slices")
        self._resample = settings.resample(BICUBIC)
        self._patches = Patches(pixels, patch)
        self.numbering = "<image_id>{}</image_id>" if settings.flag("use_image_id", numbers) else ""
        self.settings = ("slices", self._block, self._slice, self._most, merge, self._resample, pixels)

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        require_ratio(picture)
        height, width = picture.shape[:2]
        rows, columns = self._slicing(height, width)
        tiles: tuple[Picture, ...] = (resize(picture, *self._size(height, width), self._resample),)
        if rows:
            high, wide = self._size(_multiple(height, rows) / rows, _multiple(width, columns) / columns)
            tiles += cut(resize(picture, high * rows, wide * columns, self._resample), rows, columns)
        grids = [self._patches.grid(tile) for tile in tiles]
        if max(map(math.prod, grids)) > self.max_rows or sum(map(math.prod, grids)) > MAX_PATCHES:
            raise ValueError(f"an image of {width} x {height} pixels is too narrow for this model")
        return tiles, Slices(rows, columns, grids[0], grids[-1])

    def _slicing(self, height: int, width: int) -> Grid:
        """Rows and columns of slices: about as many as it takes, of those whose ratio is nearest to the image's."""
        wanted = min(math.ceil(height * width / self._slice**2), self._most)
        best, least = (0, 0), math.inf
        for count in range(wanted - 1, wanted + 2) if wanted > 1 else ():
            for rows in range(1, count + 1) if 1 < count <= self._most else ():
                if count % rows == 0:
                    error = abs(math.log(width / height) - math.log(count // rows / rows))
                    if error < least or (error == least and rows > best[0]):
                        best, least = (rows, count // rows), error
        return best

    def _size(self, height: float, width: float) -> Grid:
        """The size with about the area of a slice, its sides multiples of a block, half to even."""
        ratio = width / height
        height = int(self._slice / math.sqrt(ratio))
        return _multiple(height, self._block), _multiple(int(height * ratio), self._block)

    def num_tokens(self, layout: Hashable) -> int:
        return sum(self._counts(layout))

    def _counts(self, layout: Hashable) -> tuple[int, ...]:
        """The embeddings of each tile."""
        assert isinstance(layout, Slices)
        grids = (layout.overview, *[layout.last] * (layout.rows * layout.columns))
        return tuple(map(self._tokens_of, grids))

    def _tokens_of(self, grid: Grid) -> int:
        """The embeddings of a tile of so many patches."""
        return grid[0] * grid[1] // self._merge**2

    def expansion(self, layout: Hashable) -> Expansion:
        assert isinstance(layout, Slices)
        row = f"<slice>{self.slot}</slice>" * layout.columns
        return Expansion(f"<image>{self.slot}</image>" + "\n".join([row] * layout.rows), self._counts(layout))


def _multiple(length: float, of: int) -> int:
    return max(round(length / of) * of, of)
