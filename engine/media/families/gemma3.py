"""Gemma 3 (https://arxiv.org/abs/2503.19786): SigLIP over a square, and the mean of blocks of its patches."""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Mapping
from typing import Any

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.module_tensors import in_places, module_tensors, norm_tables
from ...models.spec import NormSpec, ProjectionSpec, TowerSpec, tower_shapes
from ...models.tensor_ref import TensorRef
from ..media import Media
from ..picture import Picture
from ..processing import Patches, block_means, resize
from ..vision import Expansion, Vision
from .settings import BILINEAR, HALF, ProcessorSettings, decoder_size, part_of, require_patches, require_size, square
from .towers import MODULES, conv, embedded, even_segments, plain_layer, table_normalized


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Gemma3Vision:
    """The vision of Gemma 3."""
    return Gemma3Vision(architecture, config, processor)


class Gemma3Vision(Vision):
    """An image is stretched to one square; its tokens see each other. Each has the same layout, None."""

    placeholder = "<start_of_image>"
    slot = "<image_soft_token>"
    two_way = True

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        tower, settings = part_of(config, "vision_config"), ProcessorSettings(processor)
        settings.refuse("do_pan_and_scan", False)
        tower.refuse("model_type", "siglip_vision_model")
        hidden, patch = tower.integer("hidden_size", 768), square(tower, "patch_size", 16)
        self._side = square(tower, "image_size", 224)
        require_size(settings, self._side, 224)
        self._grid = self._side // patch
        tokens = ConfigReader(config).integer("mm_tokens_per_image", 256)
        self._tokens = math.isqrt(tokens)  # along a side
        self._block = self._grid // self._tokens
        if self._tokens**2 != tokens or not self._block or self._grid // self._block != self._tokens:
            raise ConfigReader(config).error(
                "mm_tokens_per_image", f"a square that the {self._grid} x {self._grid} patches of an image divide into"
            )
        self.max_rows = self._grid**2
        require_patches(self.max_rows, "an image")
        self._resample = settings.resample(BILINEAR)
        self._patches = Patches(settings.pixels(HALF, HALF), patch)
        layer = plain_layer(tower, "gelu_pytorch_tanh", 1e-6)
        self._norm = NormSpec("layer", tower.number("layer_norm_eps", 1e-6), bias=True)
        rms = NormSpec("rms", self._norm.eps, unit_offset=True)
        self.spec = TowerSpec(
            hidden,
            (layer,) * tower.with_defaults(num_hidden_layers=12).num_layers("num_hidden_layers"),
            projections=(
                ("patches", ProjectionSpec(self._patches.inputs, hidden, bias=True)),
                ("connector", ProjectionSpec(hidden, decoder_size(architecture, config), norm=rms)),
            ),
            tables=(("positions", (self._grid**2, hidden)), *norm_tables("post_norm", self._norm, hidden)),
        )
        names = {**MODULES, **conv("embeddings.patch_embedding"), "positions": "embeddings.position_embedding.weight"}
        names |= {"post_norm": "post_layernorm"}
        projector: dict[str, str | TensorRef] = {
            "connector.weight": TensorRef("mm_input_projection_weight", transpose=True),
            "connector.norm": "mm_soft_emb_norm",
        }
        shapes = tower_shapes(self.spec)
        of_tower = [name for name in shapes if not name.startswith("connector.")]
        of_projector = [name for name in shapes if name.startswith("connector.")]
        self.tensors = {
            **in_places(
                module_tensors(of_tower, names, "encoder.layers."),
                ("model.", ""),
                ("vision_tower.",),
                ("vision_model.", ""),
            ),
            **in_places(module_tensors(of_projector, projector), ("model.", ""), ("multi_modal_projector.",)),
        }
        self.settings = ("gemma3", self._side, self._resample, self._patches.pixels)

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        return (resize(picture, self._side, self._side, self._resample),), None

    def num_tokens(self, layout: Hashable) -> int:
        return self._tokens**2

    def expansion(self, layout: Hashable) -> Expansion:
        return Expansion(f"\n\n<start_of_image>{self.slot}<end_of_image>\n\n", (self._tokens**2,))

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        positions = tower.table("positions")
        rows = yield from embedded(tower, self._patches, media.tiles, lambda start, stop: positions[start:stop])
        rows = yield from tower.layers(rows, even_segments(1, len(rows)))
        rows = yield from table_normalized(tower, "post_norm", rows, self._norm)
        means = block_means(rows, (self._grid, self._grid), self._block)
        return (yield from tower.project("connector", means))
