"""Qwen3-VL (https://arxiv.org/abs/2511.21631) and the vision of Qwen3.5."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...devices.tower import Rows, TowerExecutor
from ...models.module_tensors import norm_tables
from ...models.spec import AttentionSpec, MlpSpec, NormSpec, ProjectionSpec, ResidualBlockSpec, TowerSpec
from ..media import Media
from ..processing import bilinear
from ..vision import Marks
from .qwen_vl import EPS, VIDEO_PAD, Bounds, Grid, QwenVision, each_image, grid_of, require_indices
from .settings import head_dim_of, output_size, require_entries
from .towers import axial_rope

_NORM = NormSpec("layer", EPS, bias=True)
_MAX_DEEPSTACK = 16


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Qwen3Vision:
    """The vision of any of them. Only Qwen3-VL adds something after layers of the decoder."""
    return Qwen3Vision(architecture, config, processor)


class Qwen3Vision(QwenVision):
    """The tower of Qwen3-VL: a table of positions beside rope, and embeddings taken after several layers."""

    video = Marks(f"<|vision_start|>{VIDEO_PAD}<|vision_end|>", VIDEO_PAD)
    video_pixels = Bounds(128 * 32**2, 768 * 32**2)
    steps_apart = True

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(architecture, config, processor, patch_size=16)
        tower = self.tower_config
        hidden, heads = tower.integer("hidden_size", 1152), tower.integer("num_heads", 16)
        size = head_dim_of(tower, hidden, heads)
        attention = AttentionSpec(
            heads, heads, size, size**-0.5, qkv_bias=True, out_bias=True, rope=axial_rope(tower, size), two_way=True
        )
        act = tower.activation("hidden_act", "gelu_pytorch_tanh")
        mlp = MlpSpec(tower.integer("intermediate_size", 4304), act, gated=False, bias=True)
        layer = (ResidualBlockSpec(attention, _NORM), ResidualBlockSpec(mlp, _NORM))
        depth = tower.with_defaults(depth=27).num_layers("depth")
        self._taken: tuple[int, ...] = ()
        if architecture.startswith("Qwen3VL"):
            self._taken = require_indices(tower, "deepstack_visual_indexes", (8, 16, 24), depth)
        if len(self._taken) > _MAX_DEEPSTACK:
            raise tower.error("deepstack_visual_indexes", f"at most {_MAX_DEEPSTACK} layers")
        self.added_after = tuple(range(len(self._taken)))
        entries = tower.integer("num_position_embeddings", 2304)
        self._side = math.isqrt(entries)
        if self._side**2 != entries:
            raise tower.error("num_position_embeddings", "the square of a number")
        require_entries(tower, "num_position_embeddings", self._side)
        outputs = output_size(tower, "out_hidden_size", self.decoder_size, 3584)
        joined = hidden * self.merge**2
        stacked = tuple(
            projection
            for i in range(len(self._taken))
            for projection in (
                (f"merge_{i}", ProjectionSpec(joined, joined, bias=True, norm=_NORM, activation="gelu")),
                (f"connector_{i}", ProjectionSpec(joined, outputs, bias=True)),
            )
        )
        projections = (
            ("patches", ProjectionSpec(self.patches.inputs, hidden, bias=True)),
            *self.merger(hidden, outputs),
            *stacked,
        )
        tables = (("positions", (entries, hidden)), *norm_tables("merge_norm", _NORM, hidden))
        self.spec = TowerSpec(hidden, (layer,) * depth, projections, tables)
        names = {
            "up": "mlp.linear_fc1",
            "down": "mlp.linear_fc2",
            "positions": "pos_embed.weight",
            "merge_norm": "merger.norm",
            "merge": "merger.linear_fc1",
            "connector": "merger.linear_fc2",
        }
        for i in range(len(self._taken)):
            merger = f"deepstack_merger_list.{i}"
            names |= {
                f"merge_{i}.norm": f"{merger}.norm",
                f"merge_{i}": f"{merger}.linear_fc1",
                f"connector_{i}": f"{merger}.linear_fc2",
            }
        self.tensors = self.tensors_of(names)

    def embed(
        self, media: Media, tower: TowerExecutor, places: tuple[NDArray[np.int32], NDArray[np.int32]]
    ) -> Generator[None, None, Rows]:
        table, grid = tower.table("positions"), grid_of(media.layout)

        def add(start: int, stop: int) -> Rows:
            return bilinear(table, self._side, places[0][start:stop], places[1][start:stop], grid)

        return (yield from self.patch_rows(media, tower, add))

    def through(
        self, rows: Rows, positions: NDArray[np.int32], grid: Grid, tower: TowerExecutor
    ) -> Generator[None, None, Rows]:
        segments, taken = each_image(rows, grid), []
        for index in range(len(tower.spec.layers)):
            rows = yield from tower.layer(index, rows, segments, positions, in_place=True)
            if index in self._taken:
                i = self._taken.index(index)
                joined = yield from tower.project(f"merge_{i}", rows.reshape(-1, rows.shape[1] * self.merge**2))
                taken.append((yield from tower.project(f"connector_{i}", joined)))
        embeddings = yield from self.merged(rows, _NORM, tower)
        return np.concatenate([embeddings, *taken], axis=1) if taken else embeddings
