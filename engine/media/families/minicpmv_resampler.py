"""MiniCPM-V 2.5 to 4.5 (https://arxiv.org/abs/2408.01800): SigLIP over slices, and a resampler.

Learned queries see the patches of a tile, whose keys have sines and cosines of their row and column. The formulas are
those of the code in https://huggingface.co/openbmb/MiniCPM-V-2_6, and in MiniCPM-Llama3-V-2_5 beside it.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.module_tensors import in_places, module_tensors, norm_tables
from ...models.spec import CrossAttentionSpec, NormSpec, ProjectionSpec, TowerSpec, tower_shapes
from ...models.tensor_ref import TensorRef
from ...models.text_part import MINICPM_V_2_5, minicpm_v_version
from ..media import Media
from ..processing import Floats, block_places, nearest_below
from ..vision import Expansion
from .settings import HALF, ProcessorSettings, decoder_size, part_of, require_entries, square
from .slices import Grid, SlicedVision, Slices
from .towers import MODULES, conv, embedded, in_pieces, plain_layer, table_normalized

_VERSIONS = (MINICPM_V_2_5, "2.6", "4.0", "4.5")
_HEAD_DIM = 128
_MAX_QUERIES = 4096
_NORM = NormSpec("layer", 1e-6, bias=True)  # of all norms in the resampler


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> ResampledVision:
    """The vision of MiniCPM-V with a resampler."""
    return ResampledVision(architecture, config, processor)


class ResampledVision(SlicedVision):
    """Each tile has as many embeddings as there are queries, whatever its size."""

    placeholder = "(<image>./</image>)"
    slot = "<unk>"

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        tower, settings, whole = part_of(config, "vision_config"), ProcessorSettings(processor), ConfigReader(config)
        version = minicpm_v_version(config)
        if version not in _VERSIONS:
            raise whole.error("version", f"{', '.join(_VERSIONS)} for images: others have other slices")
        # Its code finds the patches' places in the table as if they were a single row. One mark is around all slices.
        self._is_first = version == MINICPM_V_2_5
        hidden, patch = tower.integer("hidden_size", 768), square(tower, "patch_size", 16)
        colours = {f"image_{name}": settings.raw(f"norm_{name}") for name in ("mean", "std")}
        pixels = ProcessorSettings({**colours, **processor}).pixels(HALF, HALF)
        super().__init__(settings, pixels, patch, 1, numbers=False)
        self._queries = whole.integer("query_num", 64)
        if self._queries > _MAX_QUERIES:
            raise whole.error("query_num", f"at most {_MAX_QUERIES}")
        if settings.integer("image_feature_size", self._queries if self._is_first else 64) != self._queries:
            raise settings.error("image_feature_size", f"{self._queries}, the query_num of config.json")
        self._side = square(tower, "image_size", 224) // patch  # of the table of positions
        require_entries(tower, "image_size", self._side)
        depth = tower.with_defaults(num_hidden_layers=12).num_layers("num_hidden_layers")
        depth -= whole.flag("drop_vision_last_layer", False)
        outputs = decoder_size(architecture, config)
        if outputs % _HEAD_DIM:
            raise whole.error("hidden_size", f"a multiple of {_HEAD_DIM}, the width of the resampler's heads")
        self._norm = NormSpec("layer", tower.number("layer_norm_eps", 1e-6), bias=True)
        same = ProjectionSpec(outputs, outputs, bias=True)
        self.spec = TowerSpec(
            hidden,
            (plain_layer(tower, "gelu_pytorch_tanh", 1e-6),) * depth,
            (
                ("patches", ProjectionSpec(self._patches.inputs, hidden, bias=True)),
                ("kv", ProjectionSpec(hidden, outputs)),
                *((name, same) for name in ("queries", "keys", "values", "attended")),
                ("connector", ProjectionSpec(outputs, outputs, norm=_NORM)),
            ),
            (
                ("positions", (self._side**2, hidden)),
                ("learned", (self._queries, outputs)),
                *norm_tables("post_norm", self._norm, hidden),
                *norm_tables("kv_norm", _NORM, outputs),
                *norm_tables("query_norm", _NORM, outputs),
            ),
            (("resampler", CrossAttentionSpec(outputs // _HEAD_DIM, _HEAD_DIM, _HEAD_DIM**-0.5)),),
        )
        names = {
            **MODULES,
            **conv("embeddings.patch_embedding"),
            "positions": "embeddings.position_embedding.weight",
            "post_norm": "post_layernorm",
        }
        of_resampler: dict[str, str | TensorRef] = {
            "learned": "query",
            "query_norm": "ln_q",
            "kv": "kv_proj",
            "kv_norm": "ln_kv",
            "attended": "attn.out_proj",
            "connector.norm": "ln_post",
            "connector.weight": TensorRef("proj", transpose=True),
        }
        for i, name in enumerate(("queries", "keys", "values")):
            rows = i * outputs, (i + 1) * outputs
            for kind in ("weight", "bias"):
                of_resampler[f"{name}.{kind}"] = TensorRef(f"attn.in_proj_{kind}", rows=rows)
        shapes = tower_shapes(self.spec)
        resampler = [name for name in shapes if name in of_resampler or name.rpartition(".")[0] in of_resampler]
        of_tower = [name for name in shapes if name not in resampler]
        self.tensors = {
            **in_places(module_tensors(of_tower, names, "encoder.layers."), ("vpm.",)),
            **in_places(module_tensors(resampler, of_resampler), ("resampler.",)),
        }

    def _tokens_of(self, grid: Grid) -> int:
        return self._queries

    def expansion(self, layout: Hashable) -> Expansion:
        if not self._is_first:
            return super().expansion(layout)
        assert isinstance(layout, Slices)
        image = f"<image>{self.slot}</image>"
        rows = "\n".join([image * layout.columns] * layout.rows)
        return Expansion(image + f"<slice>{rows}</slice>" if rows else image, self._counts(layout))

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        grids = [self._patches.grid(tile) for tile in media.tiles]
        bounds = np.cumsum([0, *(rows * columns for rows, columns in grids)]).astype(np.int32)
        table, pieces = tower.table("positions"), []
        for tile, grid in zip(media.tiles, grids, strict=True):
            places = (1, grid[0] * grid[1]) if self._is_first else grid
            down, across = (nearest_below(self._side, _fractions(count)) for count in places)
            patches = yield from embedded(tower, self._patches, (tile,))
            pieces.append(patches + table[(down[:, None] * self._side + across).reshape(-1)])
        rows = yield from tower.layers(np.concatenate(pieces), bounds)
        rows = yield from table_normalized(tower, "post_norm", rows, self._norm)
        rows = yield from tower.project("kv", rows)
        rows = yield from table_normalized(tower, "kv_norm", rows, _NORM)
        values = yield from tower.project("values", rows)
        grid_places = [
            np.concatenate(of_axis) for of_axis in zip(*(block_places(*grid) for grid in grids), strict=True)
        ]
        waves = _waves(max(map(max, grids)), rows.shape[1] // 2)

        def placed(start: int, piece: Rows) -> Rows:
            row, column = (of_axis[start : start + len(piece)] for of_axis in grid_places)
            moved: Rows = piece + np.concatenate([waves[column], waves[row]], axis=1)
            return moved

        keys = yield from in_pieces(rows, placed)
        keys = yield from tower.project("keys", keys)
        queries = yield from table_normalized(tower, "query_norm", tower.table("learned"), _NORM)
        queries = yield from tower.project("queries", queries)
        seen = []
        for start, stop in pairwise(bounds.tolist()):
            seen.append((yield from tower.attend("resampler", queries, keys[start:stop], values[start:stop])))
        rows = yield from tower.project("attended", np.concatenate(seen))
        return (yield from tower.project("connector", rows))


def _fractions(count: int) -> Floats:
    """Where patches lie along a side, from 0 to 1, rounded as in the published code."""
    step = np.float64(np.float32(1) / np.float32(count))
    places: Floats = (np.arange(count, dtype=np.float64) * step).astype(np.float32)
    return places


def _waves(count: int, width: int) -> Floats:
    """The sines of the places below `count`, and then the cosines: `[count, width]`."""
    frequencies = np.arange(width // 2, dtype=np.float32) / np.float32(width / 2)
    frequencies = np.float32(1) / np.float32(10000) ** frequencies
    angles = np.arange(count, dtype=np.float32)[:, None] * frequencies
    waves: Floats = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return waves
