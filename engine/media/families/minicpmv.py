"""MiniCPM-V 4.6 (https://github.com/OpenBMB/MiniCPM-V): SigLIP over an overview and slices, patches merged twice."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.module_tensors import in_places, module_tensors, norm_tables
from ...models.spec import NormSpec, ProjectionSpec, TowerSpec, tower_shapes
from ..media import Media
from ..processing import Indices, block_places, joined_blocks, nearest_below
from .settings import HALF, ProcessorSettings, decoder_size, part_of, require_entries, square
from .slices import Grid, SlicedVision, Slices
from .towers import MODULES, conv, embedded, even_segments, in_pieces, plain_layer, table_normalized

_MERGE = 2  # patches along a side of what either step merges
_EPS = 1e-6  # of the norm before the connector


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> MiniCpmVision:
    """The vision of MiniCPM-V 4.6."""
    return MiniCpmVision(architecture, config, processor)


class MiniCpmVision(SlicedVision):
    """Blocks of patches become one within the tower, unless four times as many tokens are wanted, and again behind."""

    placeholder = "<|image_pad|>"
    slot = "<|image_pad|>"

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        tower, settings, whole = part_of(config, "vision_config"), ProcessorSettings(processor), ConfigReader(config)
        hidden, patch = tower.integer("hidden_size", 768), square(tower, "patch_size", 16)
        whole.refuse("merge_kernel_size", [_MERGE, _MERGE])
        tower.refuse("window_kernel_size", [_MERGE, _MERGE])
        whole.refuse("merger_times", 1)
        whole.refuse("drop_vision_last_layer", False)
        mode = settings.raw("downsample_mode") or whole.raw("downsample_mode") or "16x"
        if mode not in ("4x", "16x"):
            raise settings.error("downsample_mode", "4x or 16x")
        depth = tower.with_defaults(num_hidden_layers=12).num_layers("num_hidden_layers")
        inserted = whole.raw("insert_layer_id")
        inserted = 6 if inserted is None else inserted
        if type(inserted) is not int or not 0 <= inserted < depth:
            raise whole.error("insert_layer_id", f"a number of a layer, below {depth}")
        self._merged_after = inserted if mode == "16x" else None
        merge = _MERGE * (_MERGE if mode == "16x" else 1)
        super().__init__(settings, settings.pixels(HALF, HALF), patch, merge, numbers=True)
        self._side = square(tower, "image_size", 224) // patch  # of the table of positions
        require_entries(tower, "image_size", self._side)
        layer = plain_layer(tower, "gelu_pytorch_tanh", 1e-6)
        self._norm = NormSpec("layer", tower.number("layer_norm_eps", 1e-6), bias=True)
        joined, layers = hidden * _MERGE**2, (layer,) * depth
        connector_norm = NormSpec("layer", _EPS, bias=True)
        projections = [
            ("patches", ProjectionSpec(self._patches.inputs, hidden, bias=True)),
            ("merge", ProjectionSpec(joined, joined, bias=True, norm=connector_norm, activation="gelu")),
            ("connector", ProjectionSpec(joined, decoder_size(architecture, config), bias=True)),
        ]
        if self._merged_after is not None:
            inner = tower.integer("intermediate_size", 3072) * _MERGE**2
            layers += (layer[:1],)  # the attention within blocks, which the others' numbers go around
            projections += [
                ("block_up", ProjectionSpec(joined, inner, bias=True, norm=self._norm, activation="gelu_tanh")),
                ("block_down", ProjectionSpec(inner, hidden, bias=True)),
            ]
        self.spec = TowerSpec(
            hidden,
            layers,
            tuple(projections),
            (("positions", (self._side**2, hidden)), *norm_tables("post_norm", self._norm, hidden)),
        )
        names = {
            **MODULES,
            **conv("embeddings.patch_embedding"),
            "positions": "embeddings.position_embedding.weight",
            "post_norm": "post_layernorm",
            "block_up.norm": "vit_merger.pre_norm",
            "block_up": "vit_merger.linear_1",
            "block_down": "vit_merger.linear_2",
        }
        of_connector = {"merge.norm": "mlp.0.pre_norm", "merge": "mlp.0.linear_1", "connector": "mlp.0.linear_2"}
        shapes, within = tower_shapes(self.spec), f"layers.{depth}."
        connector = [name for name in shapes if name.startswith(("merge.", "connector."))]
        of_tower = [name for name in shapes if name not in connector and not name.startswith(within)]
        of_blocks = module_tensors(
            [name.removeprefix(within) for name in shapes if name.startswith(within)],
            {name: f"vit_merger.{module}" for name, module in MODULES.items()},
        )
        tensors = module_tensors(of_tower, names, "encoder.layers.")
        tensors |= {f"{within}{name}": ref for name, ref in of_blocks.items()}
        self.tensors = {
            **in_places(tensors, ("model.", ""), ("vision_tower.",)),
            **in_places(module_tensors(connector, of_connector), ("model.", ""), ("merger.",)),
        }

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        layout = media.layout
        assert isinstance(layout, Slices)
        grids = [self._patches.grid(tile) for tile in media.tiles]
        table, pieces = tower.table("positions"), []
        for tile, grid in zip(media.tiles, grids, strict=True):
            down, across = (
                nearest_below(self._side, np.arange(count, dtype=np.float32) / np.float32(count)) for count in grid
            )
            rows = yield from embedded(tower, self._patches, (tile,))
            pieces.append(rows + table[(down[:, None] * self._side + across).reshape(-1)])
        rows = np.concatenate(pieces)
        for index in range(len(tower.spec.layers) - (self._merged_after is not None)):
            rows = yield from tower.layer(index, rows, _bounds(grids))
            if index == self._merged_after:
                rows = yield from self._merged(rows, grids, tower)
                grids = [(height // _MERGE, width // _MERGE) for height, width in grids]
        rows = yield from table_normalized(tower, "post_norm", rows, self._norm)
        bounds = _bounds(grids)
        joined = np.concatenate(
            [joined_blocks(rows[bounds[i] : bounds[i + 1]], grid, _MERGE) for i, grid in enumerate(grids)]
        )
        rows = yield from tower.project("merge", joined)
        return (yield from tower.project("connector", rows))

    def _merged(self, rows: Rows, grids: list[Grid], tower: TowerExecutor) -> Generator[None, None, Rows]:
        """A row of each block: its patches see each other, and their mean is added to what they become together."""
        bounds = _bounds(grids)
        order = np.concatenate([start + _block_order(*grid) for start, grid in zip(bounds[:-1], grids, strict=True)])
        size = _MERGE**2
        rows = yield from tower.layer(len(tower.spec.layers) - 1, rows[order], even_segments(len(rows) // size, size))
        joined = rows.reshape(-1, size * rows.shape[1])
        inner = yield from tower.project("block_up", joined)
        outer = yield from tower.project("block_down", inner)
        parts = rows.reshape(-1, size, rows.shape[1])
        return (yield from in_pieces(outer, lambda start, piece: piece + _mean(parts[start : start + len(piece)])))


def _bounds(grids: list[Grid]) -> Indices:
    return np.cumsum([0, *(height * width for height, width in grids)]).astype(np.int32)


def _block_order(height: int, width: int) -> Indices:
    """The number that each patch has in a grid, block by block."""
    rows, columns = block_places(height, width, _MERGE)
    return rows * np.int32(width) + columns


def _mean(parts: Rows) -> Rows:
    """Of the second axis, summed one after the other."""
    total = parts[:, 0]
    for i in range(1, parts.shape[1]):
        total = total + parts[:, i]
    result: Rows = total / np.float32(parts.shape[1])
    return result
