"""Aya Vision (https://arxiv.org/abs/2505.08751) and Command A Vision: SigLIP over tiles, and a gated MLP."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from typing import Any

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.module_tensors import norm_tables
from ...models.spec import NormSpec, ProjectionSpec, TowerSpec
from ...models.tensor_ref import TensorRef
from ..media import Media
from ..processing import arrangements
from ..vision import Expansion
from .internvl import TiledVision
from .llava_parts import tensors_of
from .settings import CLIP_MEAN, CLIP_STD, ProcessorSettings, decoder_size, part_of
from .tile_tower import TileTower
from .towers import in_pieces, table_normalized

_COMMAND = "Cohere2VisionForConditionalGeneration"


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> AyaVision:
    """The vision of either."""
    return (CommandVision if architecture == _COMMAND else AyaVision)(architecture, config, processor)


class AyaVision(TiledVision):
    """Blocks of patches become embeddings by a gated MLP. Each tile has a number in the prompt."""

    placeholder = "<image>"
    slot = "<|IMG_PATCH|>"

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        settings, whole, is_command = ProcessorSettings(processor), ConfigReader(config), architecture == _COMMAND
        pixels = settings.pixels(CLIP_MEAN, CLIP_STD)
        if is_command:  # whose features are those behind the last layer, whatever its config says
            whole = whole.with_fields(vision_feature_layer=-1, vision_feature_select_strategy="full")
        self._tower = TileTower(part_of(config, "vision_config"), whole, pixels, -1, "full")
        merge = whole.integer("downsample_factor", 2)
        if self._tower.tokens != self._tower.grid**2 or self._tower.grid % merge:
            raise whole.error("downsample_factor", f"a number that divides {self._tower.grid} patches")
        side, patch = self._tower.side, self._tower.patches.size
        super().__init__(settings, side, patch, merge, default_side=512 if is_command else 384)
        joined, outputs = self._tower.width * merge**2, decoder_size(architecture, config)
        inner, odd = divmod(whole.integer("alignment_intermediate_size", 36864 if is_command else outputs), 2)
        if odd:
            raise whole.error("alignment_intermediate_size", "an even number")
        norm = None if is_command else NormSpec("layer", whole.number("adapter_layer_norm_eps", 1e-6), bias=True)
        self.spec = TowerSpec(
            self._tower.hidden,
            self._tower.layers,
            (
                self._tower.patch_projection,
                ("merge", ProjectionSpec(joined, inner, bias=True, norm=norm)),
                ("gate", ProjectionSpec(joined, inner, bias=True, norm=norm, activation="silu")),
                ("connector", ProjectionSpec(inner, outputs, bias=True)),
            ),
            (
                *self._tower.tables,
                *(norm_tables("post_norm", self._tower.norm, self._tower.hidden) if is_command else ()),
            ),
        )
        of_projector: dict[str, str | TensorRef] = {
            "merge": TensorRef("linear_1", rows=(0, inner)),
            "gate": TensorRef("linear_1", rows=(inner, 2 * inner)),
            "merge.norm": "layernorm",
            "gate.norm": "layernorm",
            "connector": "linear_2",
        }
        self.tensors = tensors_of(
            self.spec,
            {**self._tower.names, "post_norm": "post_layernorm"},
            "encoder.layers.",
            ("vision_model.", ""),
            of_projector,
        )

    def expansion(self, layout: Hashable) -> Expansion:
        assert isinstance(layout, int)
        tiles = "".join(f"TILE_{number}{self.slot}" for number in range(1, layout))
        text = f"<|START_OF_IMG|>{tiles}TILE_GLOBAL{self.slot}<|END_OF_IMG|>"
        return Expansion(text, (self.num_tokens(1),) * layout)

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        rows = yield from self._features(media, tower)
        joined = self._joined(rows, len(media.tiles))
        up = yield from tower.project("merge", joined)
        gate = yield from tower.project("gate", joined)
        inner = yield from in_pieces(up, lambda start, piece: piece * gate[start : start + len(piece)])
        return (yield from tower.project("connector", inner))

    def _features(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        return (yield from self._tower.features(tower, media.tiles))


class CommandVision(AyaVision):
    """An image grows to the smallest canvas of tiles that it fits, or shrinks to the one that keeps most of it."""

    placeholder = "<|IMG_PATCH|>"

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        super().__init__(architecture, config, processor)
        self._canvases = arrangements(1, self._most)  # the least number of tiles is not used
        self.settings = ("command", self._side, self._most, self._resample, self._patches.pixels)

    def _columns_and_rows(self, height: int, width: int) -> tuple[int, int]:
        # Of several with the same scale, the first: divided as the processor divides.
        side = self._side
        scales = [min(columns * side / width, rows * side / height) for columns, rows in self._canvases]
        if max(scales) < 1:
            return self._canvases[scales.index(max(scales))]
        return self._canvases[scales.index(min(scale for scale in scales if scale >= 1))]

    def expansion(self, layout: Hashable) -> Expansion:
        assert isinstance(layout, int)
        tiles = f"{self.slot}<|IMG_LINE_BREAK|>" * layout
        return Expansion(f"<|START_OF_IMG|>{tiles}<|END_OF_IMG|>", (self.num_tokens(1),) * layout)

    def _features(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        rows = yield from super()._features(media, tower)
        return (yield from table_normalized(tower, "post_norm", rows, self._tower.norm))
