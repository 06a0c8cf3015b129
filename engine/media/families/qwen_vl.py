"""What the Qwen-VL models have in common: images in their own aspect ratio, rope by row and column, merged blocks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...devices.tower import Rows, TowerExecutor
from ...errors import ModelError
from ...models.config import ConfigReader
from ...models.spec import NormSpec, ProjectionSpec, tower_shapes
from ...models.tensor_ref import TensorRef
from ..media import Media
from ..processing import Image, Patches, block_places, require_ratio, resize
from ..vision import Expansion, Vision
from .settings import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    ProcessorSettings,
    decoder_size,
    part_of,
    require_patches,
    rows_of_blocks,
    square,
)
from .towers import conv, embedded, fused_qkv, in_places, module_tensors, table_normalized

EPS = 1e-6  # of all norms; configs do not say it
_MAX_SIDE_PATCHES = 2**13
_LEAST_FACTOR = 4  # pixels

Grid = tuple[int, int]  # rows and columns of patches

# Where checkpoints have some of the weights, for `tensors_of`.
GATED_MLP = {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
MERGER = {"merge_norm": "merger.ln_q", "merge": "merger.mlp.0", "connector": "merger.mlp.2"}


class QwenVision(Vision):
    """An image keeps its aspect ratio: its sides become multiples of a merged block, its area stays within bounds.

    `pixels` are these bounds where the settings have none; each frame is `counted`, or one of them. The layout is the
    rows and columns of patches. Patches come block by block; a block becomes one embedding.
    """

    placeholder = "<|image_pad|>"
    slot = "<|image_pad|>"

    def __init__(
        self,
        architecture: str,
        config: Mapping[str, Any],
        processor: Mapping[str, Any],
        patch_size: int,
        pixels: tuple[int, int] = (56**2, 28**2 * 1280),
        counted: bool = False,
    ) -> None:
        self.tower_config = part_of(config, "vision_config")
        self.decoder_size = decoder_size(architecture, config)
        settings = ProcessorSettings(processor)
        tower = self.tower_config
        patch, merge = square(tower, "patch_size", patch_size), tower.integer("spatial_merge_size", 2)
        frames = tower.integer("temporal_patch_size", 2)
        tower.refuse("in_channels", 3)
        tower.refuse("in_chans", 3)
        for name, ours, default in (
            ("patch_size", patch, 14),
            ("merge_size", merge, 2),
            ("temporal_patch_size", frames, 2),
        ):
            if settings.integer(name, default) != ours:
                raise settings.error(name, f"{ours}, as the vision_config of config.json has it")
        if frames > 8 or merge > 16:
            raise ModelError("config.json: vision_config: at most 8 frames and blocks of 16 x 16 patches are supported")
        self.merge = merge
        self.factor = patch * merge
        if self.factor < _LEAST_FACTOR:
            raise tower.error("patch_size", f"such that a merged block has at least {_LEAST_FACTOR} pixels a side")
        self._least, self._most = _pixels(settings, *pixels)
        self._frames = frames if counted else 1
        require_patches(
            max(self._most // self._frames, self.factor**2) // patch**2, "an image of size.longest_edge pixels"
        )
        self.max_rows = rows_of_blocks(self._most // self._frames // self.factor**2, merge)
        self.resample = settings.resample(BICUBIC)
        self.patches = Patches(settings.pixels(CLIP_MEAN, CLIP_STD), patch, merge, frames)
        self.settings = (
            "qwen-vl",
            self.factor,
            self._least,
            self._most,
            self._frames,
            self.resample,
            self.patches.pixels,
        )

    def process(self, image: Image) -> tuple[tuple[Image, ...], Hashable]:
        require_ratio(image)
        height, width = self.size_of(*image.shape[:2])
        tile = resize(image, height, width, self.resample)
        return (tile,), self.patches.grid(tile)

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Qwen's smart_resize: sides to multiples of a block, half to even, then within the bounds of the area."""
        factor, frames = self.factor, self._frames
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if frames * rows * columns > self._most:
            by = math.sqrt((frames * height * width) / self._most)
            rows = max(factor, math.floor(height / by / factor) * factor)
            columns = max(factor, math.floor(width / by / factor) * factor)
        elif frames * rows * columns < self._least:
            by = math.sqrt(self._least / (frames * height * width))
            rows, columns = math.ceil(height * by / factor) * factor, math.ceil(width * by / factor) * factor
        return rows, columns

    def num_tokens(self, layout: Hashable) -> int:
        rows, columns = grid_of(layout)
        return rows * columns // self.merge**2

    def expansion(self, layout: Hashable) -> Expansion:
        return Expansion(self.slot, (self.num_tokens(layout),))

    def positions(self, layouts: Sequence[Hashable]) -> list[NDArray[np.int32]]:
        return [self._positions(grid_of(layout)) for layout in layouts]

    def _positions(self, grid: Grid) -> NDArray[np.int32]:
        rows, columns = np.indices((grid[0] // self.merge, grid[1] // self.merge), np.int32).reshape(2, -1)
        return np.stack([np.zeros_like(rows), rows, columns])

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        grid = grid_of(media.layout)
        places = block_places(*grid, self.merge)
        rows = yield from self.embed(media, tower, places)
        return (yield from self.through(rows, np.stack(places), grid, tower))

    def embed(
        self, media: Media, tower: TowerExecutor, places: tuple[NDArray[np.int32], NDArray[np.int32]]
    ) -> Generator[None, None, Rows]:
        """The image's patches as rows of the tower. `places` are the row and the column of each of them."""
        return (yield from embedded(tower, self.patches, media.tiles))

    @abstractmethod
    def through(
        self, rows: Rows, positions: NDArray[np.int32], grid: Grid, tower: TowerExecutor
    ) -> Generator[None, None, Rows]:
        """The embeddings of rows of the tower at `positions [2, N]`."""

    def merger(self, hidden: int, outputs: int) -> tuple[tuple[str, ProjectionSpec], ...]:
        """The two linear layers that make an embedding of a block."""
        joined = hidden * self.merge**2
        return (
            ("merge", ProjectionSpec(joined, joined, bias=True, activation="gelu")),
            ("connector", ProjectionSpec(joined, outputs, bias=True)),
        )

    def tensors_of(self, names: Mapping[str, str | TensorRef]) -> dict[str, tuple[TensorRef, ...]]:
        """Where the weights of `spec` lie: `names` of modules as in `module_tensors`, beside those of all Qwen-VL."""
        shared = {
            **conv("patch_embed.proj"),
            **fused_qkv("attn.qkv", self.spec.hidden_size),
            "o": "attn.proj",
            "attention_norm": "norm1",
            "mlp_norm": "norm2",
        }
        tensors = module_tensors(tower_shapes(self.spec), {**shared, **names}, "blocks.")
        return in_places(tensors, ("model.visual.", "visual."))

    def merged(self, rows: Rows, norm: NormSpec, tower: TowerExecutor) -> Generator[None, None, Rows]:
        """An embedding of each block of rows."""
        rows = yield from table_normalized(tower, "merge_norm", rows, norm)
        rows = yield from tower.project("merge", rows.reshape(-1, rows.shape[1] * self.merge**2))
        return (yield from tower.project("connector", rows))


def grid_of(layout: Hashable) -> Grid:
    """The layout of an image: rows and columns of patches."""
    assert isinstance(layout, tuple)
    return layout[0], layout[1]


def whole(rows: Rows) -> NDArray[np.int32]:
    """One segment of all rows."""
    return np.array([0, len(rows)], np.int32)


def _pixels(settings: ProcessorSettings, least: int, most: int) -> tuple[int, int]:
    """The least and the most pixels of an image, by either way to say them."""
    size = settings.part("size")
    least = settings.integer("min_pixels", size.integer("shortest_edge", size.integer("min_pixels", least)))
    most = settings.integer("max_pixels", size.integer("longest_edge", size.integer("max_pixels", most)))
    if least > most:
        raise settings.error("size", "such that the least number of pixels is not above the most")
    return least, most


def require_indices(config: ConfigReader, name: str, default: tuple[int, ...], count: int) -> tuple[int, ...]:
    """A list of numbers of layers, each below `count`, in ascending order. Raises ModelError for anything else."""
    value = config.raw(name)
    value = default if value is None else value
    if (
        not isinstance(value, list | tuple)
        or not all(type(index) is int and 0 <= index < count for index in value)
        or sorted({*value}) != [*value]
    ):
        raise config.error(name, f"an ascending list of numbers of layers, each below {count}")
    return tuple(value)
