"""LLaVA 1.5 (https://arxiv.org/abs/2310.03744): the last layers but one of CLIP, and an MLP."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from typing import Any

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.spec import TowerSpec
from ..media import Media
from ..picture import Picture
from ..processing import centre_crop, padded_to_square, require_ratio, resize
from ..vision import Expansion, Vision
from .llava_parts import projector, tensors_of
from .settings import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    ProcessorSettings,
    decoder_size,
    part_of,
    require_patches,
    side,
    square,
)
from .tile_tower import TileTower


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
    """The vision of LLaVA, by the kind of its tower: Pixtral's, or one over tiles."""
    if part_of(config, "vision_config").raw("model_type") == "pixtral":
        from .pixtral import PixtralVision

        return PixtralVision(architecture, config, processor)
    return LlavaVision(architecture, config, processor)


class LlavaVision(Vision):
    """An image's shorter side is resized, and its middle cropped to a square. Each has the same layout, None."""

    placeholder = "<image>"
    slot = "<image>"

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        settings, whole = ProcessorSettings(processor), ConfigReader(config)
        pixels = settings.pixels(CLIP_MEAN, CLIP_STD)
        self._tower = TileTower(part_of(config, "vision_config"), whole, pixels, -2, "default")
        self._patches, self._side = self._tower.patches, self._tower.side
        require_patches(self._tower.grid**2, "an image")
        self.max_rows = self._tower.grid**2 + 1
        self._read_size(settings)
        self._crop = settings.flag("do_center_crop", "siglip" not in str(settings.raw("image_processor_type")).lower())
        crop = settings.raw("crop_size")
        if self._crop and square(settings.with_fields(crop_size=224 if crop is None else crop), "crop_size") != (
            self._side
        ):
            raise settings.error("crop_size", f"{self._side}, the image_size of vision_config in config.json")
        if not self._crop and self._size != (self._side, self._side):
            raise settings.error("size", f"{self._side} x {self._side}, because images are not cropped")
        self._resample = settings.resample(BICUBIC)
        self._pad = None
        if settings.raw("image_processor_type") in ("LlavaImageProcessor", "LlavaImageProcessorFast"):
            self._pad = _colour(pixels.mean) if settings.flag("do_pad", False) else None
        self.spec = TowerSpec(
            self._tower.hidden,
            self._tower.layers,
            (
                self._tower.patch_projection,
                *projector(whole, self._tower.width, decoder_size(architecture, config)),
            ),
            self._tower.tables,
        )
        self.tensors = tensors_of(self.spec, self._tower.names, "encoder.layers.", ("vision_model.", ""))
        self.settings = ("llava", self._side, self._size, self._shorter, self._crop, self._pad, self._resample, pixels)

    def _read_size(self, settings: ProcessorSettings) -> None:
        """The size before cropping: both sides, or the shorter side alone."""
        size = settings.part("size")
        self._size: tuple[int, int] | None = None
        self._shorter = 0
        if size.raw("height") is not None:
            self._size = side(size, "height"), side(size, "width")
        else:
            self._shorter = settings.only_part("size", "shortest_edge", 224)
            size.refuse("longest_edge")

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        if self._size is None:
            require_ratio(picture)  # the longer side follows from the shorter one
        if self._pad is not None:
            picture = padded_to_square(picture, self._pad)
        height, width = picture.shape[:2]
        short, long = min(height, width), max(height, width)
        target = self._size
        if target is None:
            other = int(self._shorter * long / short)
            target = (other, self._shorter) if width <= height else (self._shorter, other)
        picture = resize(picture, *target, self._resample)
        return (centre_crop(picture, self._side, self._side) if self._crop else picture,), None

    def num_tokens(self, layout: Hashable) -> int:
        return self._tower.tokens

    def expansion(self, layout: Hashable) -> Expansion:
        return Expansion(self.slot, (self._tower.tokens,))

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        features = yield from self._tower.features(tower, media.tiles)
        features = yield from tower.project("merge", features)
        return (yield from tower.project("connector", features))


def _colour(mean: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(int(value * 255) for value in mean)
