"""Aya Vision (https://arxiv.org/abs/2505.08751): SigLIP over tiles that are chosen as those of InternVL are."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from typing import Any

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.spec import NormSpec, ProjectionSpec, TowerSpec
from ...models.tensor_ref import TensorRef
from ..media import Media
from ..vision import Expansion
from .internvl import TiledVision
from .llava_parts import tensors_of
from .settings import CLIP_MEAN, CLIP_STD, ProcessorSettings, decoder_size, part_of
from .tile_tower import TileTower
from .towers import in_pieces


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> AyaVision:
    """The vision of Aya Vision."""
    return AyaVision(architecture, config, processor)


class AyaVision(TiledVision):
    """Blocks of patches become embeddings by a gated MLP. Each tile has a number in the prompt."""

    placeholder = "<image>"
    slot = "<|IMG_PATCH|>"

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        settings, whole = ProcessorSettings(processor), ConfigReader(config)
        pixels = settings.pixels(CLIP_MEAN, CLIP_STD)
        self._tower = TileTower(part_of(config, "vision_config"), whole, pixels, -1, "full")
        merge = whole.integer("downsample_factor", 2)
        if self._tower.tokens != self._tower.grid**2 or self._tower.grid % merge:
            raise whole.error("downsample_factor", f"a number that divides {self._tower.grid} patches")
        super().__init__(settings, self._tower.side, self._tower.patches.size, merge)
        joined, outputs = self._tower.width * merge**2, decoder_size(architecture, config)
        inner, odd = divmod(whole.integer("alignment_intermediate_size", outputs), 2)
        if odd:
            raise whole.error("alignment_intermediate_size", "an even number")
        norm = NormSpec("layer", whole.number("adapter_layer_norm_eps", 1e-6), bias=True)
        self.spec = TowerSpec(
            self._tower.hidden,
            self._tower.layers,
            (
                self._tower.patch_projection,
                ("merge", ProjectionSpec(joined, inner, bias=True, norm=norm)),
                ("gate", ProjectionSpec(joined, inner, bias=True, norm=norm, activation="silu")),
                ("connector", ProjectionSpec(inner, outputs, bias=True)),
            ),
            self._tower.tables,
        )
        of_projector: dict[str, str | TensorRef] = {
            "merge": TensorRef("linear_1", rows=(0, inner)),
            "gate": TensorRef("linear_1", rows=(inner, 2 * inner)),
            "merge.norm": "layernorm",
            "gate.norm": "layernorm",
            "connector": "linear_2",
        }
        self.tensors = tensors_of(self.spec, self._tower.names, "encoder.layers.", ("vision_model.", ""), of_projector)

    def expansion(self, layout: Hashable) -> Expansion:
        assert isinstance(layout, int)
        tiles = "".join(f"TILE_{number}{self.slot}" for number in range(1, layout))
        text = f"<|START_OF_IMG|>{tiles}TILE_GLOBAL{self.slot}<|END_OF_IMG|>"
        return Expansion(text, (self.num_tokens(1),) * layout)

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        rows = yield from self._tower.features(tower, media.tiles)
        joined = self._joined(rows, len(media.tiles))
        up = yield from tower.project("merge", joined)
        gate = yield from tower.project("gate", joined)
        inner = yield from in_pieces(up, lambda start, piece: piece * gate[start : start + len(piece)])
        return (yield from tower.project("connector", inner))
