"""Phi-3-vision and Phi-3.5-vision (https://arxiv.org/abs/2404.14219): CLIP over tiles, neighbouring patches joined.

The formulas are those of the code in https://huggingface.co/microsoft/Phi-3.5-vision-instruct.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...declaring.record import record
from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.module_tensors import in_places, module_tensors
from ...models.spec import ProjectionSpec, TowerSpec, tower_shapes
from ...models.tensor_ref import TensorRef
from ..media import Media
from ..picture import Picture
from ..processing import Floats, Image, Patches, cut, joined_blocks, resize, resized_bicubic
from ..vision import Expansion, Vision
from .settings import BILINEAR, CLIP_MEAN, CLIP_STD, ProcessorSettings, part_of, require_patches
from .tile_tower import TileTower

_MAX_TILES = 256
_MERGE = 2
# Configs do not have the sizes of the tower, which is CLIP's large one.
_CLIP = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}

_PREFIX = "model.vision_embed_tokens."
# Beside the tower.
_BESIDE: dict[str, str | TensorRef] = {
    "newline": TensorRef("sub_GN", flat=True),
    "separator": TensorRef("glb_GN", flat=True),
    "merge": "img_projection.0",
    "connector": "img_projection.2",
}


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Phi3Vision:
    """The vision of Phi-3-vision."""
    return Phi3Vision(config, processor)


class Phi3Vision(Vision):
    """An image is resized to whole tiles along its longer side, and padded with white to whole tiles along the other.

    The layout is the rows and columns of tiles. The features of all tiles come first, a learned row behind each row of
    them, then another learned row, then the features of the whole image.
    """

    placeholder = "<|image|>"
    slot = "<|image|>"
    numbered = "<|image_{}|>"
    request_fields = frozenset({"num_crops"})

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        settings, whole = ProcessorSettings(processor), ConfigReader(config)
        tower, embedding = part_of(config, "img_processor"), part_of(config, "embd_layer")
        tower.refuse("name", "clip_vision_model")
        tower.refuse("type_feature", "patch")
        embedding.refuse("hd_transform_order", "sub_glb")
        embedding.refuse("projection_cls", "mlp")
        for name in ("use_hd_transform", "with_learnable_separator"):
            if not embedding.flag(name, False):
                raise embedding.error(name, "true")
        layers = whole.with_fields(vision_feature_layer=tower.raw("layer_idx"))
        pixels = settings.pixels(CLIP_MEAN, CLIP_STD)
        self._tower = TileTower(
            tower.with_defaults(**_CLIP).with_fields(model_type="clip_vision_model"), layers, pixels, -2, "default"
        )
        self._patches, self._side, grid = self._tower.patches, self._tower.side, self._tower.grid
        if grid % _MERGE:
            raise tower.error("patch_size", f"such that there are a multiple of {_MERGE} patches along a side")
        self._blocks = grid // _MERGE  # along a side of a tile
        for said in (tower, settings):
            if said.integer("num_img_tokens", self._blocks**2) != self._blocks**2:
                raise said.error("num_img_tokens", f"{self._blocks**2}, as the tower's sizes demand")
        if tower.integer("image_dim_out", self._tower.hidden) != self._tower.width:
            raise tower.error("image_dim_out", f"{self._tower.width}, as wide as the tower")
        self._most = settings.integer("num_crops", 1)
        if self._most > _MAX_TILES:
            raise settings.error("num_crops", f"at most {_MAX_TILES}")
        require_patches((self._most + 1) * grid**2, "an image of num_crops tiles")
        self.max_rows = grid**2 + 1
        joined, outputs = self._tower.width * _MERGE**2, whole.integer("hidden_size")
        self.spec = TowerSpec(
            self._tower.hidden,
            self._tower.layers,
            (
                self._tower.patch_projection,
                ("merge", ProjectionSpec(joined, outputs, bias=True, activation="gelu")),
                ("connector", ProjectionSpec(outputs, outputs, bias=True)),
            ),
            (*self._tower.tables, ("newline", (joined,)), ("separator", (joined,))),
        )
        shapes = tower_shapes(self.spec)
        beside = [name for name in shapes if name.startswith(tuple(_BESIDE))]
        in_tower = module_tensors([name for name in shapes if name not in beside], self._tower.names, "encoder.layers.")
        self.tensors = {
            **in_places(in_tower, (_PREFIX,), ("img_processor.vision_model.",)),
            **in_places(module_tensors(beside, _BESIDE), (_PREFIX,)),
        }
        self.settings = ("phi3v", self._side, self._most, pixels)

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        is_tall = picture.shape[0] > picture.shape[1]
        wide = Picture(np.ascontiguousarray(picture.pixels.transpose(1, 0, 2))) if is_tall else picture
        ratio = wide.shape[1] / wide.shape[0]
        columns = 1
        while (columns + 1) * math.ceil((columns + 1) / ratio) <= self._most:
            columns += 1
        width = columns * self._side
        height = int(width / ratio)
        if not height:
            raise ValueError(
                f"an image of {picture.shape[1]} x {picture.shape[0]} pixels is too narrow: nothing of it is left in a "
                "tile"
            )
        rows = -(-height // self._side)
        padded = np.full((rows * self._side, width, 3), 255, np.uint8)
        top = (len(padded) - height) // 2
        padded[top : top + height] = resize(wide, height, width, BILINEAR).pixels
        if is_tall:
            padded, rows, columns = np.ascontiguousarray(padded.transpose(1, 0, 2)), columns, rows
        return cut(Picture(padded), rows, columns), (rows, columns)

    def num_tokens(self, layout: Hashable) -> int:
        rows, columns = _tiles(layout)
        side = self._blocks
        return rows * side * (columns * side + 1) + 1 + side * (side + 1)

    def expansion(self, layout: Hashable) -> Expansion:
        # What is behind an image begins as a text does.
        return Expansion(f"{self.slot}<s>", (self.num_tokens(layout),))

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        rows, columns = _tiles(media.layout)
        features = yield from self._tower.features(tower, media.tiles)
        side = self._side
        image = np.empty((rows * side, columns * side, 3), np.uint8)
        for row in range(rows):
            tiles = media.tiles[row * columns : (row + 1) * columns]
            np.concatenate(tiles, axis=1, out=image[row * side : (row + 1) * side])
            yield
        numbers = []
        for piece in resized_bicubic(self._patches.pixels, image, side, side):
            numbers.append(piece)
            yield
        ready = _Numbers(self._patches.pixels, self._patches.size)
        whole = yield from self._tower.features(tower, [np.concatenate(numbers)], ready)
        joined = np.empty((self.num_tokens(media.layout), self._tower.width * _MERGE**2), np.float32)
        behind = len(joined) - self._blocks * (self._blocks + 1)  # of the tiles and the separator
        joined[behind - 1] = tower.table("separator")
        yield from self._join(joined[: behind - 1], features, rows, columns, tower)
        yield from self._join(joined[behind:], whole, 1, 1, tower)
        merged = yield from tower.project("merge", joined)
        return (yield from tower.project("connector", merged))

    def _join(
        self, out: Rows, features: Rows, rows: int, columns: int, tower: TowerExecutor
    ) -> Generator[None, None, None]:
        """Write the features of tiles, joined in blocks, with the same row behind each row of blocks."""
        side, grid = self._blocks, self._tower.grid
        plane = out.reshape(rows, side, columns * side + 1, -1)
        plane[:, :, -1] = tower.table("newline")
        for tile in range(rows * columns):
            row, column = divmod(tile, columns)
            blocks = joined_blocks(features[tile * grid**2 : (tile + 1) * grid**2], (grid, grid), _MERGE)
            plane[row, :, column * side : (column + 1) * side] = blocks.reshape(side, side, -1)
            yield


@record(frozen=True)
class _Numbers(Patches):
    """Patches of tiles whose levels are numbers already."""

    def pieces(self, images: Sequence[Image], together: int = 1) -> Iterator[Floats]:
        for image in images:
            rows, columns = self.grid(image)
            used = image[: rows * self.size, : columns * self.size]
            blocks = used.reshape(rows, self.size, columns, self.size, 3).transpose(0, 2, 4, 1, 3)
            yield np.ascontiguousarray(blocks, np.float32).reshape(rows * columns, self.inputs)


def _tiles(layout: Hashable) -> tuple[int, int]:
    assert isinstance(layout, tuple)
    return layout[0], layout[1]
