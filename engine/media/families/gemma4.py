"""Gemma 4 (https://ai.google.dev/gemma/docs/core/model_card_4): a tower with norms on all sides, means of blocks."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ...devices.tower import Rows, TowerExecutor
from ...errors import ModelError
from ...models.module_tensors import in_places, module_tensors
from ...models.spec import AttentionSpec, MlpSpec, NormSpec, ProjectionSpec, ResidualBlockSpec, TowerSpec, tower_shapes
from ...models.tensor_ref import TensorRef
from ..media import Media
from ..processing import Patches, Pixels, block_means, block_places
from .gemma4_images import ONE, ZERO, Gemma4Images, blocks_of, require_sides
from .towers import axial_rope, embedded, even_segments

_MAX_WIDTH = 2**16  # of all heads together, whose order is a list


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Gemma4Vision:
    """The vision of Gemma 4."""
    return Gemma4Vision(architecture, config, processor)


class Gemma4Vision(Gemma4Images):
    """A table of positions for rows and one for columns, rope by both, and RMS norms before and behind each mixer."""

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(architecture, config, processor)
        tower = self.tower_config
        hidden, heads = tower.integer("hidden_size", 768), tower.integer("num_attention_heads", 12)
        kv_heads, size = tower.integer("num_key_value_heads", 12), tower.integer("head_dim", 64)
        if heads % kv_heads or heads * size > _MAX_WIDTH:
            raise ModelError(
                "config.json: vision_config: num_attention_heads must be a multiple of num_key_value_heads, and all "
                f"heads together at most {_MAX_WIDTH} wide"
            )
        tower.refuse("attention_bias", False)
        clipped = tower.flag("use_clipped_linears", False)
        self.max_rows = self.most_tokens * self.merge**2
        longest = self.most_tokens * self.merge  # in patches
        require_sides(tower, "position_embedding_size", tower.integer("position_embedding_size", 10240), longest)
        # The model doubles the processor's numbers and takes 1 away.
        given = self.processor.pixels(ZERO, ONE, normalizes=False)
        halves = tuple(std / 2 for std in given.std)
        middles = tuple(mean + half for mean, half in zip(given.mean, halves, strict=True))
        self._patches = Patches(Pixels(given.factor, middles, halves), self.patch, colours_last=True)
        norm = NormSpec("rms", tower.number("rms_norm_eps", 1e-6))
        bare = NormSpec("rms", norm.eps, weight=False)
        rope = axial_rope(tower.with_defaults(rope_theta=100.0), size)
        attention = AttentionSpec(
            heads, kv_heads, size, 1.0, qk_norm=norm, v_norm=bare, rope=rope, two_way=True, clipped=clipped
        )
        act = tower.activation("hidden_activation", "gelu_pytorch_tanh")
        mlp = MlpSpec(tower.integer("intermediate_size", 3072), act, gated=True, clipped=clipped)
        layer = (ResidualBlockSpec(attention, norm, norm), ResidualBlockSpec(mlp, norm, norm))
        self._standardizes = tower.flag("standardize", False)
        tables: tuple[tuple[str, tuple[int, ...]], ...] = (("columns", (longest, hidden)), ("rows", (longest, hidden)))
        if self._standardizes:
            tables += (("std_bias", (hidden,)), ("std_scale", (hidden,)))
        self.spec = TowerSpec(
            hidden,
            (layer,) * tower.with_defaults(num_hidden_layers=16).num_layers("num_hidden_layers"),
            projections=(
                ("patches", ProjectionSpec(self._patches.inputs, hidden)),
                ("connector", ProjectionSpec(hidden, self.text_config.integer("hidden_size"), norm=bare)),
            ),
            tables=tables,
        )
        positions = "patch_embedder.position_embedding_table"
        names: dict[str, str | TensorRef] = {
            "patches": "patch_embedder.input_proj",
            "columns": TensorRef(positions, index=0, rows=(0, longest)),
            "rows": TensorRef(positions, index=1, rows=(0, longest)),
            "q": TensorRef("self_attn.q_proj.linear", permute=_in_halves(heads, size)),
            "k": TensorRef("self_attn.k_proj.linear", permute=_in_halves(kv_heads, size)),
            "q_norm": TensorRef("self_attn.q_norm", permute=_in_halves(1, size)),
            "k_norm": TensorRef("self_attn.k_norm", permute=_in_halves(1, size)),
            "v": "self_attn.v_proj.linear",
            "o": "self_attn.o_proj.linear",
            **{part: f"mlp.{part}_proj.linear" for part in ("gate", "up", "down")},
            **{f"{part}.bounds": _bounds(f"self_attn.{part}_proj") for part in "qkvo"},
            **{f"{part}.bounds": _bounds(f"mlp.{part}_proj") for part in ("gate", "up", "down")},
            "attention_norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
            "std_bias": "std_bias",
            "std_scale": "std_scale",
        }
        shapes = tower_shapes(self.spec)
        of_tower = [name for name in shapes if not name.startswith("connector.")]
        of_projector = [name for name in shapes if name.startswith("connector.")]
        self.tensors = {
            **in_places(module_tensors(of_tower, names, "encoder.layers."), ("model.", ""), ("vision_tower.",)),
            **in_places(
                module_tensors(of_projector, {"connector": "embedding_projection"}), ("model.", ""), ("embed_vision.",)
            ),
        }
        self.settings = ("gemma4", self.sizes, self._patches.pixels)

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        blocks = blocks_of(media.layout)
        grid = blocks[0] * self.merge, blocks[1] * self.merge
        rows_of, columns_of = block_places(*grid)
        by_column, by_row = tower.table("columns"), tower.table("rows")
        rows = yield from embedded(
            tower,
            self._patches,
            media.tiles,
            lambda start, stop: by_column[columns_of[start:stop]] + by_row[rows_of[start:stop]],
        )
        rows = yield from tower.layers(rows, even_segments(1, len(rows)), np.stack([columns_of, rows_of]))
        rows = block_means(rows, grid, self.merge) * np.float32(self.spec.hidden_size**0.5)
        if self._standardizes:
            rows = (rows - tower.table("std_bias")) * tower.table("std_scale")
        return (yield from tower.project("connector", rows))


def _bounds(module: str) -> TensorRef:
    """The bounds of a clipped linear layer."""
    first, *others = (
        TensorRef(f"{module}.{of}_{bound}", flat=True) for of in ("input", "output") for bound in ("min", "max")
    )
    return replace(first, stack=tuple(others))


def _in_halves(heads: int, size: int) -> tuple[int, ...]:
    """The order of heads' dimensions that puts the first of each pair that is rotated into the first half of a head.

    The checkpoint has a half of the head for columns and one for rows, each with the first and the second dimensions of
    its pairs one after the other.
    """
    quarter = size // 4
    order = np.arange(heads * size).reshape(heads, 2, 2, quarter).transpose(0, 2, 1, 3)
    return tuple(order.reshape(-1).tolist())
