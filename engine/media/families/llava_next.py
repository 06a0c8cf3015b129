"""LLaVA-NeXT (https://llava-vl.github.io/blog/2024-01-30-llava-next) and LLaVA-OneVision (https://arxiv.org/abs/2408.03326)."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.spec import TowerSpec
from ..media import Media
from .any_resolution import NEXT_SIZES, AnyResolutionVision
from .llava_parts import PROJECTOR, projector, tensors_of
from .settings import CLIP_MEAN, CLIP_STD, ProcessorSettings, decoder_size, part_of
from .tile_tower import TileTower

_ONEVISION_SIZES = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> LlavaNextVision:
    """The vision of either."""
    return LlavaNextVision(architecture, config, processor)


class LlavaNextVision(AnyResolutionVision):
    """Each feature becomes a row of the decoder. OneVision shrinks those of many tiles."""

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        settings, whole = ProcessorSettings(processor), ConfigReader(config)
        onevision = architecture == "LlavaOnevisionForConditionalGeneration"
        pixels = settings.pixels(CLIP_MEAN, CLIP_STD)
        layer, strategy = (-1, "full") if onevision else (-2, "default")
        super().__init__(
            settings,
            whole,
            pixels,
            TileTower(part_of(config, "vision_config"), whole, pixels, layer, strategy),
            sizes=_ONEVISION_SIZES if onevision else NEXT_SIZES,
            tile=384 if onevision else 224,
            most=_most_tiles(whole) if onevision else None,
        )
        outputs = decoder_size(architecture, config)
        self.spec = TowerSpec(
            self._tower.hidden,
            self._tower.layers,
            (self._tower.patch_projection, *projector(whole, self._tower.width, outputs)),
            (*self._tower.tables, ("newline", (outputs,))),
        )
        self.tensors = tensors_of(
            self.spec,
            self._tower.names,
            "encoder.layers.",
            ("vision_model.", ""),
            PROJECTOR,
            {"newline": "image_newline"},
        )

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        features = yield from self._tower.features(tower, media.tiles)
        features = yield from tower.project("merge", features)
        features = yield from tower.project("connector", features)
        return self._packed(media, features, tower.table("newline"))


def _most_tiles(config: ConfigReader) -> int:
    """How many tiles' features are kept: those of more are shrunk."""
    value = config.raw("vision_aspect_ratio") or "anyres_max_9"
    number = str(value).removeprefix("anyres_max_")
    if not number.isdecimal() or not 0 < len(number) <= 3 or not int(number):
        raise config.error("vision_aspect_ratio", "anyres_max_ and a number below 1000")
    return int(number)
