"""CLIP and SigLIP over square tiles, and the features of several of their layers: for LLaVA and its successors."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.module_tensors import norm_tables
from ...models.spec import NormSpec, ProjectionSpec
from ...models.tensor_ref import TensorRef
from ..processing import Image, Patches, Pixels
from .llava_parts import feature_layers
from .settings import square
from .towers import (
    MODULES,
    conv,
    embedded,
    embedded_behind_class,
    even_segments,
    plain_layer,
    table_normalized,
    without_class,
)


class TileTower:
    """The tower of a `vision_config`, as far as the layers go whose features a wrapper takes.

    CLIP's has a class embedding before the patches, which are taken with a `strategy` of "full" alone. A tile has
    `tokens` features; its patches are `grid` x `grid`.
    """

    def __init__(self, tower: ConfigReader, whole: ConfigReader, pixels: Pixels, layer: int, strategy: str) -> None:
        kind = tower.raw("model_type") or "clip_vision_model"
        if kind not in ("clip_vision_model", "siglip_vision_model"):
            raise tower.error("model_type", "clip_vision_model or siglip_vision_model")
        self._has_class = kind == "clip_vision_model"
        strategy = whole.raw("vision_feature_select_strategy") or strategy
        if strategy not in (("default", "full") if self._has_class else ("full",)):
            raise whole.error("vision_feature_select_strategy", "full, or default with a tower of CLIP")
        self._drops_class = strategy == "default"
        hidden, patch = tower.integer("hidden_size", 768), square(tower, "patch_size", 32 if self._has_class else 16)
        self.side = square(tower, "image_size", 224)
        self.patches = Patches(pixels, patch)
        self.grid = self.side // patch
        if not self.grid:
            raise tower.error("patch_size", f"at most the image_size {self.side}")
        depth = tower.with_defaults(num_hidden_layers=12).num_layers("num_hidden_layers")
        self._taken = feature_layers(whole, depth, layer)
        self.hidden, self.width = hidden, hidden * len(self._taken)
        self.tokens = self.grid**2 + (self._has_class and not self._drops_class)
        act, eps = ("quick_gelu", 1e-5) if self._has_class else ("gelu_pytorch_tanh", 1e-6)
        self.norm = NormSpec("layer", tower.number("layer_norm_eps", eps), bias=True)
        self.layers = (plain_layer(tower, act, eps),) * max(self._taken)
        self.patch_projection = ("patches", ProjectionSpec(self.patches.inputs, hidden, bias=not self._has_class))
        self.tables: tuple[tuple[str, tuple[int, ...]], ...] = (("positions", (self.grid**2, hidden)),)
        self.names: dict[str, str | TensorRef] = {
            **MODULES,
            **conv("embeddings.patch_embedding"),
            "positions": "embeddings.position_embedding.weight",
        }
        if self._has_class:
            self.tables = (
                ("positions", (self.grid**2 + 1, hidden)),
                ("class", (hidden,)),
                *norm_tables("pre_norm", self.norm, hidden),
            )
            self.names |= {"class": "embeddings.class_embedding", "pre_norm": "pre_layrnorm"}

    def features(
        self, tower: TowerExecutor, tiles: Sequence[Image], patches: Patches | None = None
    ) -> Generator[None, None, Rows]:
        """The features of tiles `[tiles * tokens, width]`, cut as `patches` cuts them, if given."""
        patches = patches or self.patches
        if self._has_class:
            rows = yield from embedded_behind_class(tower, patches, tiles)
            rows = yield from table_normalized(tower, "pre_norm", rows, self.norm)
        else:
            positions = tower.table("positions")
            rows = yield from embedded(
                tower, patches, tiles, lambda start, stop: positions[np.arange(start, stop) % len(positions)]
            )
        segments = even_segments(len(tiles), len(rows) // len(tiles))
        after = {0: rows}
        for index in range(len(self.layers)):
            rows = yield from tower.layer(index, rows, segments, in_place=index not in self._taken)
            if index + 1 in self._taken:
                after[index + 1] = rows
        taken = np.concatenate([after[index] for index in self._taken], axis=1)
        return without_class(taken, len(tiles)) if self._drops_class else taken
