"""PaddleOCR-VL (https://arxiv.org/abs/2510.14528): SigLIP over an image of any ratio, with rope by row and column."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...devices.tower import Rows, TowerExecutor
from ...models.module_tensors import in_places, module_tensors, norm_tables
from ...models.spec import AttentionSpec, NormSpec, ProjectionSpec, TowerSpec, tower_shapes
from ..media import Media
from ..processing import bilinear
from .qwen_vl import Grid, QwenVision, each_image, grid_of
from .settings import require_entries, square
from .towers import MODULES, axial_rope, conv, plain_layer, table_normalized

_MERGER_NORM = NormSpec("layer", 1e-5, bias=True)


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> PaddleOcrVision:
    """The vision of PaddleOCR-VL."""
    return PaddleOcrVision(architecture, config, processor)


class PaddleOcrVision(QwenVision):
    """Images as Qwen2-VL's, of one frame. The tower takes their patches in any order, and gets them block by block."""

    placeholder = "<|IMAGE_PLACEHOLDER|>"
    slot = "<|IMAGE_PLACEHOLDER|>"

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(architecture, config, processor, patch_size=14, pixels=(384**2, 1536**2), frames=1)
        tower = self.tower_config.with_defaults(hidden_size=1152, num_attention_heads=16, intermediate_size=4304)
        hidden = tower.integer("hidden_size")
        attention, mlp = plain_layer(tower, "gelu_pytorch_tanh", 1e-6)
        assert isinstance(attention.mixer, AttentionSpec)
        turned = replace(attention.mixer, rope=axial_rope(tower, attention.mixer.head_dim))
        self._side = square(tower, "image_size", 384) // self.patches.size
        require_entries(tower, "image_size", self._side)
        self._norm = NormSpec("layer", tower.number("layer_norm_eps", 1e-6), bias=True)
        self.spec = TowerSpec(
            hidden,
            ((replace(attention, mixer=turned), mlp),)
            * tower.with_defaults(num_hidden_layers=27).num_layers("num_hidden_layers"),
            projections=(
                ("patches", ProjectionSpec(self.patches.inputs, hidden, bias=True)),
                *self.merger(hidden, self.decoder_size),
            ),
            tables=(
                ("positions", (self._side**2, hidden)),
                *norm_tables("post_norm", self._norm, hidden),
                *norm_tables("merge_norm", _MERGER_NORM, hidden),
            ),
        )
        names = {
            **MODULES,
            **conv("embeddings.patch_embedding"),
            "positions": "embeddings.position_embedding.weight",
            "post_norm": "post_layernorm",
        }
        projector = {"merge_norm": "pre_norm", "merge": "linear_1", "connector": "linear_2"}
        shapes = tower_shapes(self.spec)
        of_projector = [name for name in shapes if name.split(".")[0] in projector]
        of_tower = [name for name in shapes if name not in of_projector]
        self.tensors = {
            **in_places(module_tensors(of_tower, names, "encoder.layers."), ("model.", ""), ("visual.vision_model.",)),
            **in_places(module_tensors(of_projector, projector), ("model.", ""), ("projector.", "mlp_AR.")),
        }

    def embed(
        self, media: Media, tower: TowerExecutor, places: tuple[NDArray[np.int32], NDArray[np.int32]]
    ) -> Generator[None, None, Rows]:
        table, grid = tower.table("positions"), grid_of(media.layout)

        def add(start: int, stop: int) -> Rows:
            rows, columns = (of_axis[start:stop] for of_axis in places)
            return bilinear(table, self._side, rows, columns, grid, corners=False)

        return (yield from self.patch_rows(media, tower, add))

    def through(
        self, rows: Rows, positions: NDArray[np.int32], grid: Grid, tower: TowerExecutor
    ) -> Generator[None, None, Rows]:
        rows = yield from tower.layers(rows, each_image(rows, grid), positions)
        rows = yield from table_normalized(tower, "post_norm", rows, self._norm)
        return (yield from self.merged(rows, _MERGER_NORM, tower))

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        factor = self.factor
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        return super().size_of(height, width)
