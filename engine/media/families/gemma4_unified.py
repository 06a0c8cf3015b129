"""Gemma 4, the unified models: no tower. An embedding is a projection of a block of pixels."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from ...devices.tower import Rows, TowerExecutor
from ...models.module_tensors import in_places, module_tensors, norm_tables
from ...models.spec import NormSpec, ProjectionSpec, TowerSpec, tower_shapes
from ...models.tensor_ref import TensorRef
from ..media import Media
from ..processing import Patches, block_places
from .gemma4_images import ONE, ZERO, Gemma4Images, blocks_of, require_sides
from .towers import embedded, in_pieces, table_normalized

_NORM = NormSpec("layer", 1e-5, bias=True)


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Gemma4UnifiedVision:
    """The vision of the unified models."""
    return Gemma4UnifiedVision(architecture, config, processor)


class Gemma4UnifiedVision(Gemma4Images):
    """A block's pixels are normalized and projected; a table's entries for its column and its row are added."""

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(architecture, config, processor)
        tower, most = self.tower_config, self.most_tokens
        hidden = tower.integer("mm_embed_dim", 3840)
        if tower.integer("output_proj_dims", 3840) != hidden:
            raise tower.error("output_proj_dims", f"{hidden}, which is mm_embed_dim")
        require_sides(tower, "mm_posemb_size", tower.integer("mm_posemb_size", 1120), most)
        self.max_rows = most
        pixels = self.processor.pixels(ZERO, ONE, normalizes=False)
        self._patches = Patches(pixels, self.patch * self.merge, colours_last=True)
        bare = NormSpec("rms", tower.number("rms_norm_eps", 1e-6), weight=False)
        self.spec = TowerSpec(
            hidden,
            (),
            projections=(
                ("patches", ProjectionSpec(self._patches.inputs, hidden, bias=True, norm=_NORM)),
                ("connector", ProjectionSpec(hidden, self.text_config.integer("hidden_size"), norm=bare)),
            ),
            tables=(
                ("positions", (most, 2, hidden)),
                *norm_tables("patch_norm", _NORM, hidden),
                *norm_tables("position_norm", _NORM, hidden),
            ),
        )
        names: dict[str, str | TensorRef] = {
            "patches": "patch_dense",
            "patches.norm": "patch_ln1",
            "patch_norm": "patch_ln2",
            "positions": TensorRef("pos_embedding", rows=(0, most)),
            "position_norm": "pos_norm",
        }
        shapes = [name for name in tower_shapes(self.spec) if name != "connector.weight"]
        connector = {"connector.weight": TensorRef("embedding_projection.weight")}
        self.tensors = {
            **in_places(module_tensors(shapes, names), ("model.", ""), ("vision_embedder.", "embed_vision.")),
            **in_places(connector, ("model.", ""), ("embed_vision.",), ("", "multimodal_embedder.")),
        }
        self.settings = ("gemma4-unified", self.sizes, pixels)

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        rows_of, columns_of = block_places(*blocks_of(media.layout))
        table = tower.table("positions")

        def placed(start: int, piece: Rows) -> Rows:
            here = slice(start, start + len(piece))
            added: Rows = table[columns_of[here], 0] + table[rows_of[here], 1]
            return piece + added

        rows = yield from embedded(tower, self._patches, media.tiles)
        rows = yield from table_normalized(tower, "patch_norm", rows, _NORM)
        rows = yield from in_pieces(rows, placed)
        rows = yield from table_normalized(tower, "position_norm", rows, _NORM)
        return (yield from tower.project("connector", rows))
