"""GLM-4.1V, 4.5V and 4.6V (https://arxiv.org/abs/2507.01006)."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...devices.tower import Rows, TowerExecutor
from ...models.module_tensors import norm_tables
from ...models.spec import AttentionSpec, MlpSpec, NormSpec, ProjectionSpec, ResidualBlockSpec, TowerSpec
from ...models.tensor_ref import TensorRef
from ..media import Media
from ..processing import bicubic, gelu
from ..vision import Marks
from .qwen_vl import GATED_MLP, Bounds, Grid, QwenVision, at_least_a_block, each_image, grid_of
from .settings import head_dim_of, output_size, require_entries, square
from .towers import axial_rope, in_pieces, table_normalized

_MERGER_NORM = NormSpec("layer", 1e-5, bias=True)


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Glm4vVision:
    """The vision of any of them."""
    return Glm4vVision(architecture, config, processor)


class Glm4vVision(QwenVision):
    """Images as Qwen2-VL's, but each of its frames counts. A block becomes an embedding by a convolution and an MLP."""

    placeholder = "<|image|>"
    slot = "<|image|>"
    video = Marks("<|video|>", "<|image|>")
    video_pixels = Bounds(112**2, 28**2 * 2 * 30000)
    steps_apart = True

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(architecture, config, processor, patch_size=14, pixels=(112**2, 28**2 * 15000), counted=True)
        self._is_precise = architecture == "Glm46VForConditionalGeneration"  # of seconds
        tower = self.tower_config
        hidden, heads = tower.integer("hidden_size", 1536), tower.integer("num_heads", 12)
        size = head_dim_of(tower, hidden, heads)
        outputs = output_size(tower, "out_hidden_size", self.decoder_size, 4096)
        self._norm = NormSpec("rms", tower.number("rms_norm_eps", 1e-5))
        bias, act = tower.flag("attention_bias", False), tower.activation("hidden_act", "silu")
        attention = AttentionSpec(
            heads, heads, size, size**-0.5, qkv_bias=bias, rope=axial_rope(tower, size), two_way=True
        )
        mlp = MlpSpec(outputs, act, gated=True)
        layer = (ResidualBlockSpec(attention, self._norm), ResidualBlockSpec(mlp, self._norm))
        self._side = square(tower, "image_size", 336) // self.patches.size
        require_entries(tower, "image_size", self._side)
        inner = tower.integer("intermediate_size", 13696)
        projections = (
            ("patches", ProjectionSpec(self.patches.inputs, hidden, bias=True)),
            ("blocks", ProjectionSpec(hidden * self.merge**2, outputs, bias=True)),
            ("merge", ProjectionSpec(outputs, outputs)),
            ("merge_gate", ProjectionSpec(outputs, inner, activation=act)),
            ("merge_up", ProjectionSpec(outputs, inner)),
            ("connector", ProjectionSpec(inner, outputs)),
        )
        tables = (
            ("positions", (self._side**2, hidden)),
            *norm_tables("pre_norm", self._norm, hidden),
            *norm_tables("post_norm", self._norm, hidden),
            *norm_tables("merge_norm", _MERGER_NORM, outputs),
        )
        self.spec = TowerSpec(hidden, (layer,) * tower.with_defaults(depth=24).num_layers("depth"), projections, tables)
        names: dict[str, str | TensorRef] = {
            **GATED_MLP,
            "positions": "embeddings.position_embedding.weight",
            "pre_norm": "post_conv_layernorm",
            "post_norm": "post_layernorm",
            "blocks.weight": TensorRef("downsample.weight", matrix=True),
            "blocks.bias": "downsample.bias",
            "merge": "merger.proj",
            "merge_norm": "merger.post_projection_norm",
            "merge_gate": "merger.gate_proj",
            "merge_up": "merger.up_proj",
            "connector": "merger.down_proj",
        }
        self.tensors = self.tensors_of(names)

    def embed(
        self, media: Media, tower: TowerExecutor, places: tuple[NDArray[np.int32], NDArray[np.int32]]
    ) -> Generator[None, None, Rows]:
        rows = yield from self.patch_rows(media, tower)
        rows = yield from table_normalized(tower, "pre_norm", rows, self._norm)
        table, grid = tower.table("positions"), grid_of(media.layout)

        def placed(start: int, piece: Rows) -> Rows:
            of_rows, of_columns = (of_axis[start : start + len(piece)] for of_axis in places)
            return piece + bicubic(table, self._side, of_rows, of_columns, grid)

        return (yield from in_pieces(rows, placed))

    def through(
        self, rows: Rows, positions: NDArray[np.int32], grid: Grid, tower: TowerExecutor
    ) -> Generator[None, None, Rows]:
        rows = yield from tower.layers(rows, each_image(rows, grid), positions)
        rows = yield from table_normalized(tower, "post_norm", rows, self._norm)
        # A block is joined channel by channel, each with its patches side by side.
        blocks = rows.reshape(-1, self.merge**2, rows.shape[1]).transpose(0, 2, 1)
        rows = yield from tower.project("blocks", np.ascontiguousarray(blocks).reshape(len(blocks), -1))
        rows = yield from tower.project("merge", rows)
        rows = yield from table_normalized(tower, "merge_norm", rows, _MERGER_NORM)
        rows = yield from in_pieces(rows, lambda _, piece: gelu(piece))
        gates = yield from tower.project("merge_gate", rows)
        values = yield from tower.project("merge_up", rows)
        return (yield from tower.project("connector", gates * values))

    def time_of_step(self, seconds: Sequence[float]) -> float:
        return seconds[0]

    def text_of_step(self, seconds: float) -> str:
        shown = f"{seconds:.1f} seconds" if self._is_precise else f"{int(seconds)}"
        return f"<|begin_of_image|>{self.slot}<|end_of_image|>{shown}"

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        return super().size_of(*at_least_a_block(height, width, self.factor))
