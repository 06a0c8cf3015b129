"""Qwen2.5-VL (https://arxiv.org/abs/2502.13923)."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...devices.tower import Rows, TowerExecutor
from ...models.module_tensors import norm_tables
from ...models.spec import AttentionSpec, MlpSpec, NormSpec, ProjectionSpec, ResidualBlockSpec, TowerSpec
from ..vision import Marks
from .qwen_vl import EPS, GATED_MLP, MERGER, VIDEO_PAD, Clip, Grid, QwenVision, each_image, require_indices
from .settings import head_dim_of, output_size
from .towers import axial_rope

_NORM = NormSpec("rms", EPS)
_MOST_PER_SECOND = 20  # so that no video's positions are too large


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Qwen25Vision:
    """The vision of Qwen2.5-VL."""
    return Qwen25Vision(architecture, config, processor)


class Qwen25Vision(QwenVision):
    """The tower of Qwen2.5-VL: RMSNorm, gated MLPs, and segments that are windows of the image in most layers.

    The positions of a video in time are by its seconds.
    """

    video = Marks(VIDEO_PAD, VIDEO_PAD)

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
        self._per_second = tower.integer("tokens_per_second", 4)
        if self._per_second > _MOST_PER_SECOND:
            raise tower.error("tokens_per_second", f"at most {_MOST_PER_SECOND}")
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
        order, lengths = self._windows(grid, len(rows) // (grid[0] * grid[1]))
        block = self.merge**2
        by_window = (order[:, None] * block + np.arange(block)).reshape(-1)
        rows, positions = rows[by_window], np.ascontiguousarray(positions[:, by_window])
        windows = np.concatenate([[0], np.cumsum(lengths * block)]).astype(np.int32)
        for index in range(len(tower.spec.layers)):
            segments = each_image(rows, grid) if index in self._whole_layers else windows
            rows = yield from tower.layer(index, rows, segments, positions, in_place=True)
        merged = yield from self.merged(rows, _NORM, tower)
        embeddings = np.empty_like(merged)
        embeddings[order] = merged
        return embeddings

    def times_of(self, clip: Clip) -> NDArray[np.int32]:
        step = np.float32(self._per_second) * np.float32(clip.interval)
        return (np.arange(clip.steps, dtype=np.float32) * step).astype(np.int32)

    def _windows(self, grid: Grid, images: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The merged blocks of as many images window by window, and how many each window has."""
        height, width = grid[0] // self.merge, grid[1] // self.merge
        row, column = np.indices((height, width)).reshape(2, -1)
        window = row // self._window * -(-width // self._window) + column // self._window
        first_block = np.arange(images)[:, None] * len(window)
        return (np.argsort(window, kind="stable") + first_block).reshape(-1), np.tile(np.bincount(window), images)
