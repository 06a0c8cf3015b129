"""Granite for Docling (https://huggingface.co/ibm-granite): SigLIP over tiles of a page, and several of its layers."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from typing import Any

import numpy as np

from ...devices.tower import Rows, TowerExecutor
from ...models.module_tensors import in_places, module_tensors, norm_tables
from ...models.spec import NormSpec, ProjectionSpec, TowerSpec, tower_shapes
from ..media import Media
from ..picture import Picture
from ..processing import Floats, Patches, arrangements, cut, gelu, joined_blocks, nearest_arrangement, resize
from ..vision import Expansion, Vision
from .qwen_vl import grid_of, require_indices
from .settings import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    ProcessorSettings,
    decoder_size,
    output_size,
    part_of,
    require_patches,
    require_size,
    square,
)
from .towers import MODULES, conv, embedded, even_segments, in_pieces, plain_layer, table_normalized

_MOST_ALONG_A_SIDE = 16  # tiles, for which the tokenizer has names
_MAX_TILES = 256
_NORM = NormSpec("layer", 1e-5, bias=True)  # of the connector
_AROUND, _GLOBAL = "<fake_token_around_image>", "<global-img>"


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> GraniteDoclingVision:
    """The vision of Granite for Docling."""
    return GraniteDoclingVision(architecture, config, processor)


class GraniteDoclingVision(Vision):
    """A page is stretched to tiles whose arrangement is nearest to its aspect ratio; if several, it follows as a whole.

    Blocks of patches become embeddings, those of the last layer for the decoder's input, and those of some others for
    what is added after its first layers. The layout is the rows and columns of tiles.
    """

    placeholder = "<image>"
    slot = "<image>"

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        tower, settings = part_of(config, "vision_config"), ProcessorSettings(processor)
        hidden = tower.integer("hidden_size", 768)
        outputs = output_size(tower, "out_hidden_size", decoder_size(architecture, config), 1024)
        patch, self._tile = square(tower, "patch_size", 16), square(tower, "image_size", 512)
        require_size(settings, self._tile, 512)
        self._grid, self._scale = self._tile // patch, tower.integer("scale_factor", 4)
        if not self._grid or self._grid % self._scale:
            raise tower.error("scale_factor", f"a number that divides {self._grid} patches")
        if outputs % 4:
            raise tower.error("out_hidden_size", "a multiple of 4")
        least, most = settings.integer("min_patches", 1), settings.integer("max_patches", 32)
        if not settings.flag("crop_to_patches", True):
            least = most = 1
        dense = settings.integer("dense_max_patches", most) if most > 1 and settings.raw("dense_max_patches") else most
        for name, number in (("max_patches", most), ("dense_max_patches", dense)):
            if not least <= number <= _MAX_TILES:
                raise settings.error(name, f"from min_patches to {_MAX_TILES}")
        require_patches((max(most, dense) + 1) * self._grid**2, "an image of max_patches tiles")
        settings.refuse("fine_route", False)
        self.max_rows = self._grid**2
        self._arrangements, self._dense = (
            tuple(one for one in arrangements(least, count) if max(one) <= _MOST_ALONG_A_SIDE)
            for count in (most, dense)
        )
        names_of_bounds = ("dense_max_scale", "dense_min_aspect", "dense_max_aspect")
        self._scale_below, self._ratio_above, self._ratio_to = (_bound(settings, name) for name in names_of_bounds)
        self._resample = settings.resample(BICUBIC)
        self._patches = Patches(settings.pixels(CLIP_MEAN, CLIP_STD), patch)
        depth = tower.with_defaults(num_hidden_layers=12).num_layers("num_hidden_layers")
        self._taken = require_indices(tower, "deepstack_visual_indexes", (3, 7, 10), depth)
        self.added_after = tuple(range(len(self._taken)))
        self._post_norm = NormSpec("layer", tower.number("layer_norm_eps", 1e-6), bias=True)
        layer = plain_layer(tower, "gelu_pytorch_tanh", 1e-6)
        joined = hidden * self._scale**2
        projections = [
            ("patches", ProjectionSpec(self._patches.inputs, hidden, bias=True)),
            ("merge", ProjectionSpec(joined, outputs)),
            ("connector", ProjectionSpec(outputs, outputs)),
        ]
        for i in range(len(self._taken)):
            projections += [
                (f"merge.{i}", ProjectionSpec(joined, outputs, bias=True, norm=_NORM, activation="gelu")),
                (f"connector.{i}", ProjectionSpec(outputs, outputs, bias=True)),
            ]
        self.spec = TowerSpec(
            hidden,
            (layer,) * depth,
            tuple(projections),
            (
                ("positions", (self._grid**2, hidden)),
                *norm_tables("post_norm", self._post_norm, hidden),
                *norm_tables("norm_in", _NORM, hidden),
                *norm_tables("norm_between", _NORM, outputs),
                *norm_tables("norm_out", _NORM, outputs),
            ),
        )
        names = {
            **MODULES,
            **conv("embeddings.patch_embedding"),
            "positions": "embeddings.position_embedding.weight",
            "post_norm": "post_layernorm",
            "norm_in": "connector.ln_in",
            "norm_between": "connector.ln_mid",
            "norm_out": "connector.ln_out",
            "merge": "connector.coarse.projection",
            "connector": "connector.mlp_fc2",
        }
        for i in range(len(self._taken)):
            merger = f"connector.coarse.deepstack_mergers.{i}"
            names |= {f"merge.{i}.norm": f"{merger}.layer_norm", f"merge.{i}": f"{merger}.linear_1"}
            names[f"connector.{i}"] = f"{merger}.linear_2"
        tensors = module_tensors(tower_shapes(self.spec), names, "encoder.layers.")
        self.tensors = in_places(tensors, ("model.", ""), ("vision_model.",))
        self.settings = (
            *("granite-docling", self._tile, self._arrangements, self._resample, self._patches.pixels),
            *(self._dense, self._scale_below, self._ratio_above, self._ratio_to),
        )

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        whole = (resize(picture, self._tile, self._tile, self._resample),)
        columns, rows = self._columns_and_rows(picture.shape[0], picture.shape[1])
        if rows == columns == 1:
            return whole, (1, 1)
        tiles = cut(resize(picture, rows * self._tile, columns * self._tile, self._resample), rows, columns)
        return tiles + whole, (rows, columns)

    def _columns_and_rows(self, height: int, width: int) -> tuple[int, int]:
        """Of tiles: of more than usual for a page of some aspect ratios that would become much smaller otherwise."""
        columns, rows = nearest_arrangement(self._arrangements, height, width, self._tile)
        is_dense = (
            (self._scale_below or self._ratio_above)
            and (not self._ratio_above or width / height > self._ratio_above)
            and (not self._ratio_to or width / height <= self._ratio_to)
            and (not self._scale_below or columns * self._tile / width < self._scale_below)
        )
        return nearest_arrangement(self._dense, height, width, self._tile) if is_dense else (columns, rows)

    def num_tokens(self, layout: Hashable) -> int:
        return sum(self._counts(layout))

    def _counts(self, layout: Hashable) -> tuple[int, ...]:
        rows, columns = grid_of(layout)
        tiles = rows * columns
        return ((self._grid // self._scale) ** 2,) * (tiles + (tiles > 1))

    def expansion(self, layout: Hashable) -> Expansion:
        rows, columns = grid_of(layout)
        text = "".join(
            "".join(f"{_AROUND}<row_{row}_col_{column}>{self.slot}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        text += f"\n{_AROUND}{_GLOBAL}{self.slot}{_AROUND}" if rows * columns > 1 else ""
        return Expansion(text, self._counts(layout))

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        tiles, positions = len(media.tiles), tower.table("positions")
        rows = yield from embedded(
            tower, self._patches, media.tiles, lambda start, stop: positions[np.arange(start, stop) % len(positions)]
        )
        segments = even_segments(tiles, self._grid**2)
        early: list[Rows] = []
        for index in range(len(tower.spec.layers)):
            rows = yield from tower.layer(index, rows, segments)
            if index in self._taken:
                inner = yield from tower.project(f"merge.{len(early)}", self._joined(rows, tiles))
                early.append((yield from tower.project(f"connector.{len(early)}", inner)))
        rows = yield from table_normalized(tower, "post_norm", rows, self._post_norm)
        rows = yield from table_normalized(tower, "norm_in", rows, _NORM)
        rows = yield from tower.project("merge", self._joined(rows, tiles))
        places = _places(self._grid // self._scale, rows.shape[1])
        rows = yield from in_pieces(
            rows, lambda start, piece: piece + places[np.arange(start, start + len(piece)) % len(places)]
        )
        rows = yield from table_normalized(tower, "norm_between", rows, _NORM)
        rows = yield from in_pieces(rows, lambda _, piece: gelu(piece))
        rows = yield from tower.project("connector", rows)
        rows = yield from table_normalized(tower, "norm_out", rows, _NORM)
        return np.concatenate([rows, *early], axis=1)

    def _joined(self, rows: Rows, tiles: int) -> Rows:
        # Tiles lie below each other, so their blocks are those of one tall image.
        return joined_blocks(rows, (tiles * self._grid, self._grid), self._scale)


def _bound(settings: ProcessorSettings, name: str) -> float:
    """A number that is 0 where there is no such bound."""
    return settings.number(name) if settings.raw(name) else 0.0


def _places(grid: int, width: int) -> Floats:
    """Fixed positions of a square grid `[grid^2, width]`: sines and cosines of the column, then of the row."""
    steps = 10_000.0 ** -(np.arange(width // 4, dtype=np.float64) / (width / 4))
    angles = np.arange(grid, dtype=np.float64)[:, None] * steps
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    return np.concatenate([np.tile(waves, (grid, 1)), np.repeat(waves, grid, axis=0)], axis=1)
