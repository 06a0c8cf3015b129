"""Qwen2-VL (https://arxiv.org/abs/2409.12191)."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...devices.tower import Rows, TowerExecutor
from ...models.module_tensors import norm_tables
from ...models.spec import AttentionSpec, MlpSpec, NormSpec, ProjectionSpec, ResidualBlockSpec, TowerSpec
from ..vision import Marks
from .qwen_vl import EPS, MERGER, VIDEO_PAD, Grid, QwenVision, each_image
from .settings import head_dim_of, output_size
from .towers import axial_rope

_NORM = NormSpec("layer", EPS, bias=True)


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Qwen2Vision:
    """The vision of Qwen2-VL."""
    return Qwen2Vision(architecture, config, processor)


class Qwen2Vision(QwenVision):
    """The tower of Qwen2-VL: LayerNorm, plain MLPs, all of an image in one segment."""

    video = Marks(VIDEO_PAD, VIDEO_PAD)

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(architecture, config, processor, patch_size=14)
        tower = self.tower_config
        hidden, heads = tower.integer("embed_dim", 1280), tower.integer("num_heads", 16)
        size = head_dim_of(tower, hidden, heads)
        rope = axial_rope(tower, size)
        attention = AttentionSpec(heads, heads, size, size**-0.5, qkv_bias=True, out_bias=True, rope=rope, two_way=True)
        inner = int(hidden * tower.number("mlp_ratio", 4))
        mlp = MlpSpec(inner, tower.activation("hidden_act", "quick_gelu"), gated=False, bias=True)
        layer = (ResidualBlockSpec(attention, _NORM), ResidualBlockSpec(mlp, _NORM))
        layers = (layer,) * tower.with_defaults(depth=32).num_layers("depth")
        patches = ("patches", ProjectionSpec(self.patches.inputs, hidden))
        outputs = output_size(tower, "hidden_size", self.decoder_size, 3584)
        projections = (patches, *self.merger(hidden, outputs))
        self.spec = TowerSpec(hidden, layers, projections, norm_tables("merge_norm", _NORM, hidden))
        self.tensors = self.tensors_of({**MERGER, "up": "mlp.fc1", "down": "mlp.fc2"})

    def through(
        self, rows: Rows, positions: NDArray[np.int32], grid: Grid, tower: TowerExecutor
    ) -> Generator[None, None, Rows]:
        rows = yield from tower.layers(rows, each_image(rows, grid), positions)
        return (yield from self.merged(rows, _NORM, tower))
