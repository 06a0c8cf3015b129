"""Qwen2.5-VL (https://arxiv.org/abs/2502.13923)."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...devices.tower import Rows, TowerExecutor
from ...models.spec import AttentionSpec, MlpSpec, NormSpec, ProjectionSpec, ResidualBlockSpec, TowerSpec
from .qwen_vl import EPS, GATED_MLP, MERGER, Grid, QwenVision, require_indices, whole
from .settings import head_dim_of, output_size
from .towers import axial_rope, norm_tables

_NORM = NormSpec("rms", EPS)


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Qwen25Vision:
    """The vision of Qwen2.5-VL."""
    return Qwen25Vision(architecture, config, processor)


class Qwen25Vision(QwenVision):
    """The tower of Qwen2.5-VL: RMSNorm, gated MLPs, and segments that are windows of the image in most layers."""

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(architecture, config, processor, patch_size=14)
        tower = self.tower_config
        hidden, heads = tower.integer("hidden_size", 3584), tower.integer("num_heads", 16)
        size = head_dim_of(tower, hidden, heads)
        attention = AttentionSpec(
            heads, heads, size, size**-0.5, qkv_bias=True, out_bias=True, rope=axial_rope(tower, size), two_way=True
        )
        mlp = MlpSpec(
            tower.integer("intermediate_size", 3420), tower.activation("hidden_act", "silu"), gated=True, bias=True
        )
        layer = (ResidualBlockSpec(attention, _NORM), ResidualBlockSpec(mlp, _NORM))
        depth = tower.with_defaults(depth=32).num_layers("depth")
        self._whole_layers = require_indices(tower, "fullatt_block_indexes", (7, 15, 23, 31), depth)
        self._window = tower.integer("window_size", 112) // self.merge // self.patches.size  # in merged blocks
        if not self._window:
            raise tower.error("window_size", "at least the side of a merged block, in pixels")
        outputs = output_size(tower, "out_hidden_size", self.decoder_size, 3584)
        projections = (
            ("patches", ProjectionSpec(self.patches.inputs, hidden)),
            *self.merger(hidden, outputs),
        )
        self.spec = TowerSpec(hidden, (layer,) * depth, projections, norm_tables("merge_norm", _NORM, hidden))
        self.tensors = self.tensors_of({**MERGER, **GATED_MLP})

    def through(
        self, rows: Rows, positions: NDArray[np.int32], grid: Grid, tower: TowerExecutor
    ) -> Generator[None, None, Rows]:
        order, lengths = self._windows(grid)
        block = self.merge**2
        by_window = (order[:, None] * block + np.arange(block)).reshape(-1)
        rows, positions = rows[by_window], np.ascontiguousarray(positions[:, by_window])
        windows = np.concatenate([[0], np.cumsum(lengths * block)]).astype(np.int32)
        for index in range(len(tower.spec.layers)):
            segments = whole(rows) if index in self._whole_layers else windows
            rows = yield from tower.layer(index, rows, segments, positions)
        merged = yield from self.merged(rows, _NORM, tower)
        embeddings = np.empty_like(merged)
        embeddings[order] = merged
        return embeddings

    def _windows(self, grid: Grid) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The merged blocks window by window, and how many each window has."""
        height, width = grid[0] // self.merge, grid[1] // self.merge
        row, column = np.indices((height, width)).reshape(2, -1)
        window = row // self._window * -(-width // self._window) + column // self._window
        return np.argsort(window, kind="stable"), np.bincount(window)
