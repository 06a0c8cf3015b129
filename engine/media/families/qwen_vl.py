"""What the Qwen-VL models have in common: images in their own aspect ratio, rope by row and column, merged blocks."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...devices.tower import Rows, TowerExecutor
from ...errors import ModelError
from ...models.config import ConfigReader
from ...models.module_tensors import fused_qkv, in_places, module_tensors
from ...models.spec import NormSpec, ProjectionSpec, tower_shapes
from ...models.tensor_ref import TensorRef
from ..frames import Frames
from ..media import Media
from ..picture import Picture
from ..processing import MAX_PATCHES, Patches, block_places, require_ratio, require_sides, resize
from ..request_settings import VIDEO
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
from .towers import conv, embedded, even_segments, table_normalized

EPS = 1e-6  # of all norms; configs do not say it
_LEAST_FACTOR = 4  # pixels

VIDEO_PAD = "<|video_pad|>"
Grid = tuple[int, int]  # rows and columns of patches

# Where checkpoints have some of the weights, for `tensors_of`.
GATED_MLP = {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
MERGER = {"merge_norm": "merger.ln_q", "merge": "merger.mlp.0", "connector": "merger.mlp.2"}


class Bounds(NamedTuple):
    """The least and the most pixels of an image, or of a video."""

    least: int
    most: int


class Clip(NamedTuple):
    """The layout of a video: its steps, which are a few frames each, and the rows and columns of patches.

    `seconds` are when the steps are shown, in the middle of the times of their frames, and `interval` is how long one
    takes.
    """

    steps: int
    rows: int
    columns: int
    seconds: tuple[float, ...]
    interval: float


class QwenVision(Vision):
    """An image keeps its aspect ratio: its sides become multiples of a merged block, its area stays within bounds.

    `pixels` are these bounds where the settings have none; each frame is `counted`, or one of them. A patch has as many
    `frames`, or as the config says. The layout is the rows and columns of patches. Patches come block by block; a block
    becomes one embedding.

    A video is as many images as it has steps. Its bounds are `video_pixels`. With `steps_apart` these are of all its
    frames, and each step is an image beside a text that says when it is shown; else they are of a frame. Its layout is
    a Clip.
    """

    placeholder = "<|image_pad|>"
    slot = "<|image_pad|>"
    request_fields = frozenset({"min_pixels", "max_pixels", "size"})
    video_pixels = Bounds(128 * 28**2, 768 * 28**2)
    steps_apart = False

    def __init__(
        self,
        architecture: str,
        config: Mapping[str, Any],
        processor: Mapping[str, Any],
        patch_size: int,
        pixels: tuple[int, int] = (56**2, 28**2 * 1280),
        counted: bool = False,
        frames: int | None = None,
    ) -> None:
        self.tower_config = part_of(config, "vision_config")
        self.decoder_size = decoder_size(architecture, config)
        settings = ProcessorSettings(processor)
        of_video = settings.raw(VIDEO)
        if not isinstance(of_video, Mapping | None):
            raise settings.error(VIDEO, "an object")
        videos = settings if of_video is None else ProcessorSettings(of_video)
        tower = self.tower_config
        patch, merge = square(tower, "patch_size", patch_size), tower.integer("spatial_merge_size", 2)
        default_frames = frames or 2
        frames = frames or tower.integer("temporal_patch_size", default_frames)
        tower.refuse("in_channels", 3)
        tower.refuse("in_chans", 3)
        for name, ours, default in (
            ("patch_size", patch, 14),
            ("merge_size", merge, 2),
            ("temporal_patch_size", frames, default_frames),
        ):
            if settings.integer(name, default) != ours or videos.integer(name, ours) != ours:
                raise settings.error(name, f"{ours}, as the vision_config of config.json has it")
        if frames > 8 or merge > 16:
            raise ModelError("config.json: vision_config: at most 8 frames and blocks of 16 x 16 patches are supported")
        self.merge = merge
        self.factor = patch * merge
        if self.factor < _LEAST_FACTOR:
            raise tower.error("patch_size", f"such that a merged block has at least {_LEAST_FACTOR} pixels a side")
        self._bounds, self._frames = _bounds(settings, Bounds(*pixels)), frames if counted else 1
        self._video_bounds = _bounds(videos, self.video_pixels)
        self._together = frames
        largest = self._bounds.most // self._frames
        require_patches(max(largest, self.factor**2) // patch**2, "an image of size.longest_edge pixels")
        self.max_rows = rows_of_blocks(largest // self.factor**2, merge)
        self.resample, self._video_resample = settings.resample(BICUBIC), videos.resample(BICUBIC)
        self.patches = Patches(settings.pixels(CLIP_MEAN, CLIP_STD), patch, merge, frames)
        self._video_patches = replace(self.patches, pixels=videos.pixels(CLIP_MEAN, CLIP_STD))
        self.settings = (
            "qwen-vl",
            self.factor,
            self._bounds,
            self._frames,
            self.resample,
            self.patches.pixels,
            self._video_bounds,
            self._video_resample,
            self._video_patches.pixels,
        )

    def fields_of_tokens(self, least: int | None, most: int | None) -> Mapping[str, Any]:
        pixels = self.factor**2 * self._frames
        bounds = {"shortest_edge": self._bounds.least, "longest_edge": self._bounds.most}
        if least is not None:
            bounds["shortest_edge"] = least * pixels
            bounds["longest_edge"] = max(bounds["longest_edge"], least * pixels)
        if most is not None:
            bounds["longest_edge"] = most * pixels
            bounds["shortest_edge"] = min(bounds["shortest_edge"], most * pixels)
        return {"size": bounds}

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        require_ratio(picture)
        height, width = self.size_of(*picture.shape[:2])
        tile = resize(picture, height, width, self.resample)
        return (tile,), self.patches.grid(tile)

    def process_video(self, frames: Frames) -> tuple[tuple[Picture, ...], Hashable]:
        together, count = self._together, len(frames.seconds)
        height, width = self.size_of_frames(max(count, together), frames.height, frames.width)
        of_step = (height // self.patches.size) * (width // self.patches.size)
        patches = -(-count // together) * of_step
        if patches > MAX_PATCHES or of_step > self.max_rows:
            raise ValueError(
                f"{count} frames of {width} x {height} pixels, as this model takes them, are {patches} patches. A "
                f"video may have {MAX_PATCHES}, and {self.max_rows} in {together} frames: send fewer or smaller "
                "frames, or lower max_pixels in mm_processor_kwargs"
            )
        tiles = [resize(frame, height, width, self._video_resample) for frame in frames.pictures]
        tiles += tiles[-1:] * (-count % together)
        seconds = [*frames.seconds, *frames.seconds[-1:] * (-count % together)]
        steps = range(0, len(tiles), together)
        times = tuple(self.time_of_step(seconds[step : step + together]) for step in steps)
        return tuple(tiles), Clip(len(steps), *self.patches.grid(tiles[0]), times, together / frames.fps)

    def time_of_step(self, seconds: Sequence[float]) -> float:
        """When a step is shown, by the times of its frames."""
        return (seconds[0] + seconds[-1]) / 2

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """The height and width that an image gets."""
        return smart_size(height, width, self.factor, self._bounds, self._frames, self._frames)

    def size_of_frames(self, count: int, height: int, width: int) -> tuple[int, int]:
        """The height and width that `count` frames get."""
        if not self.steps_apart:
            require_sides(height, width)
            return smart_size(height, width, self.factor, self._video_bounds)
        height, width = at_least_a_block(height, width, self.factor)
        require_sides(height, width)
        rounded = round(count / self._together) * self._together
        return smart_size(height, width, self.factor, self._video_bounds, count, rounded)

    def num_tokens(self, layout: Hashable) -> int:
        rows, columns = grid_of(layout)
        return steps_of(layout) * rows * columns // self.merge**2

    def expansion(self, layout: Hashable) -> Expansion:
        tokens = self.num_tokens(layout)
        if not isinstance(layout, Clip):
            return Expansion(self.slot, (tokens,))
        assert self.video is not None
        if not self.steps_apart:
            return Expansion(self.video.slot, (tokens,))
        text = "".join(map(self.text_of_step, layout.seconds))
        return Expansion(text, (tokens // layout.steps,) * layout.steps)

    def text_of_step(self, seconds: float) -> str:
        """The slot of a step of a video, which is shown then, among what is written around it."""
        assert self.video is not None
        return f"<{seconds:.1f} seconds>{self.video.placeholder}"

    def positions(self, layouts: Sequence[Hashable]) -> list[NDArray[np.int32]]:
        return [self._positions(layout) for layout in layouts]

    def _positions(self, layout: Hashable) -> NDArray[np.int32]:
        height, width = grid_of(layout)
        times = self.times_of(layout) if isinstance(layout, Clip) else np.zeros(1, np.int32)
        cells = np.indices((height // self.merge, width // self.merge), np.int32).reshape(2, -1)
        return np.concatenate([np.repeat(times, cells.shape[1])[None], np.tile(cells, len(times))])

    def times_of(self, clip: Clip) -> NDArray[np.int32]:
        """The position of each step of a video in time, counted from that of its first token."""
        return np.arange(clip.steps, dtype=np.int32) * np.int32(not self.steps_apart)

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        grid, steps = grid_of(media.layout), steps_of(media.layout)
        rows, columns = block_places(*grid, self.merge)
        places = np.tile(rows, steps), np.tile(columns, steps)
        embedded_rows = yield from self.embed(media, tower, places)
        return (yield from self.through(embedded_rows, np.stack(places), grid, tower))

    def embed(
        self, media: Media, tower: TowerExecutor, places: tuple[NDArray[np.int32], NDArray[np.int32]]
    ) -> Generator[None, None, Rows]:
        """The image's patches as rows of the tower. `places` are the row and the column of each of them."""
        return (yield from self.patch_rows(media, tower))

    def patch_rows(
        self, media: Media, tower: TowerExecutor, add: Callable[[int, int], Rows] | None = None
    ) -> Generator[None, None, Rows]:
        """The same before anything but what `add` gives is added to them."""
        if isinstance(media.layout, Clip):
            return (yield from embedded(tower, self._video_patches, media.tiles, add, self._together))
        return (yield from embedded(tower, self.patches, media.tiles, add))

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
    """Rows and columns of patches of an image, or of a step of a video."""
    if isinstance(layout, Clip):
        return layout.rows, layout.columns
    assert isinstance(layout, tuple)
    return layout[0], layout[1]


def steps_of(layout: Hashable) -> int:
    """How many images a medium is for the tower."""
    return layout.steps if isinstance(layout, Clip) else 1


def each_image(rows: Rows, grid: Grid) -> NDArray[np.int32]:
    """A segment for each image of `grid` patches."""
    size = grid[0] * grid[1]
    return even_segments(len(rows) // size, size)


def at_least_a_block(height: int, width: int, factor: int) -> tuple[int, int]:
    """The same size, or a larger one if a side is shorter than a block."""
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        return int(height * scale), int(width * scale)
    return height, width


def smart_size(
    height: int, width: int, factor: int, bounds: Bounds, frames: int = 1, rounded: int = 1
) -> tuple[int, int]:
    """Qwen's smart_resize: sides to multiples of a block, half to even, then within the bounds of the area.

    The area is that of all `frames`; where sides are multiples of a block, of as many as `rounded`.
    """
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rounded * rows * columns > bounds.most:
        by = math.sqrt((frames * height * width) / bounds.most)
        rows = max(factor, math.floor(height / by / factor) * factor)
        columns = max(factor, math.floor(width / by / factor) * factor)
    elif rounded * rows * columns < bounds.least:
        by = math.sqrt(bounds.least / (frames * height * width))
        rows, columns = math.ceil(height * by / factor) * factor, math.ceil(width * by / factor) * factor
    return rows, columns


def _bounds(settings: ProcessorSettings, usual: Bounds) -> Bounds:
    """The least and the most pixels, by either way to say them."""
    size = settings.part("size")
    least = settings.integer("min_pixels", size.integer("shortest_edge", size.integer("min_pixels", usual.least)))
    most = settings.integer("max_pixels", size.integer("longest_edge", size.integer("max_pixels", usual.most)))
    if least > most:
        raise settings.error("size", "such that the least number of pixels is not above the most")
    return Bounds(least, most)


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
