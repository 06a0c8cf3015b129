"""Reading the settings of an image processor and of a vision tower, with bounds on what they ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...errors import ModelError
from ...models.config import ConfigReader
from ...models.families.parts import MAX_HEAD_DIM
from ...models.text_models import TEXT_MODELS
from ...models.text_part import text_part
from ..processing import MAX_PATCHES, Pixels
from ..request_settings import SETTINGS_FILE

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3

_MAX_SIDE = 2**14  # pixels, of an image as a tower takes it
_MAX_ENTRIES = 2**10  # along a side of a table of positions


class ProcessorSettings(ConfigReader):
    """The settings of an image processor: preprocessor_config.json, or a part of processor_config.json."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values, SETTINGS_FILE)
        self.refuse("do_resize", True)
        self.refuse("do_rescale", True)

    def pixels(self, mean: tuple[float, ...], std: tuple[float, ...], *, normalizes: bool = True) -> Pixels:
        """How levels of a colour become numbers; these where the settings do not say it."""
        factor = self.number("rescale_factor", 1 / 255)
        if not self.flag("do_normalize", normalizes):
            return Pixels(factor, (0.0,) * 3, (1.0,) * 3)
        return Pixels(factor, self._colours("image_mean", mean, 0.0), self._colours("image_std", std, 1e-6))

    def _colours(self, name: str, default: tuple[float, ...], least: float) -> tuple[float, ...]:
        value = self.raw(name)
        if value is None:
            return default
        values = [value] * 3 if type(value) in (int, float) else value
        if (
            not isinstance(values, list | tuple)
            or len(values) != 3
            or not all(type(number) in (int, float) and least <= number <= 1e3 for number in values)
        ):
            raise self.error(name, f"three numbers from {least:g} to 1000")
        return tuple(map(float, values))

    def resample(self, default: int) -> int:
        """The filter for resizing, by Pillow's number for it."""
        value = self.raw("resample")
        if value is None:
            return default
        if type(value) is not int or not 0 <= value <= 5:
            raise self.error("resample", "a number from 0 to 5")
        return value

    def part(self, name: str) -> ConfigReader:
        """An object in the settings, empty if it is left out. A number alone is read as `shortest_edge`."""
        value = self.raw(name)
        if type(value) is int:
            value = {"shortest_edge": value}
        if not isinstance(value, Mapping | None):
            raise self.error(name, "an object")
        return ConfigReader(value or {}, f"{SETTINGS_FILE}: {name}")

    def only_part(self, name: str, field: str, default: int) -> int:
        """The one field of an object in the settings, a number of pixels along a side."""
        part = self.part(name)
        if self.raw(name) is not None and part.raw(field) is None:
            raise self.error(name, f"an object with {field}: other ways to say a size are not supported")
        return side(part, field, default)


def require_size(settings: ProcessorSettings, tower_side: int, default: int) -> None:
    """Raise ModelError unless images get the size that the tower has; `default` where the settings have none."""
    size = settings.part("size")
    for name in ("height", "width"):
        if side(size, name, default) != tower_side:
            raise size.error(name, f"{tower_side}, the image_size of vision_config in config.json")


def side(config: ConfigReader, name: str, default: int | None = None) -> int:
    """A number of pixels along a side. Raises ModelError, naming the field, for one that is no such number."""
    value = config.integer(name, default)
    if value > _MAX_SIDE:
        raise config.error(name, f"at most {_MAX_SIDE}")
    return value


def square(config: ConfigReader, name: str, default: int | None = None) -> int:
    """A side that is given as a number, or as two that are equal."""
    value = config.raw(name)
    if isinstance(value, Mapping):
        value = [value.get("height"), value.get("width")]
    if isinstance(value, list | tuple):
        if len(value) != 2 or value[0] != value[1]:
            raise config.error(name, "a number of pixels, or two that are equal")
        config = config.with_fields(**{name: value[0]})
    return side(config, name, default)


def part_of(config: Mapping[str, Any], name: str) -> ConfigReader:
    """An object in config.json. Raises ModelError if there is none."""
    value = config.get(name)
    if not isinstance(value, Mapping):
        raise ConfigReader(config).error(name, "an object")
    return ConfigReader(value, f"config.json: {name}")


def decoder_size(architecture: str, config: Mapping[str, Any]) -> int:
    """The width of the language model's embeddings."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or text.get("hidden_size") is None:
        text = text_part(architecture, config)
    return ConfigReader(text, "config.json: text_config").integer("hidden_size")


def output_size(tower: ConfigReader, name: str, decoder_size: int, default: int) -> int:
    """The width of a tower's embeddings. Raises ModelError unless it is the language model's."""
    size = tower.integer(name, default)
    if size != decoder_size:
        raise tower.error(name, f"{decoder_size}, as wide as the language model")
    return size


def embedding_multiplier(architecture: str, config: Mapping[str, Any]) -> float:
    """What the language model multiplies all embeddings by that it is given: Granite's is not 1.

    Granite 4 Vision is given none for an image: what its first layer sees is added after that.
    """
    if architecture == "Granite4VisionForConditionalGeneration":
        return 1.0
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    name, defaults = TEXT_MODELS.get(str(kind), ("", {}))
    if not isinstance(text, Mapping) or name != "GraniteForCausalLM":
        return 1.0
    return ConfigReader({**defaults, **text}, "config.json: text_config").number("embedding_multiplier", 1.0)


def head_dim_of(config: ConfigReader, hidden_size: int, heads: int) -> int:
    """The width of a tower's heads."""
    if hidden_size % heads or hidden_size // heads > MAX_HEAD_DIM:
        raise ModelError(
            f"config.json: vision_config: the hidden size {hidden_size} must be a multiple of the number of heads, "
            f"{heads}, and at most {MAX_HEAD_DIM} times it"
        )
    return hidden_size // heads


def require_entries(config: ConfigReader, name: str, entries: int) -> None:
    """Raise ModelError for a table of positions with no entries, or with too many along a side."""
    if not 0 < entries <= _MAX_ENTRIES:
        raise config.error(name, f"such that there are 1 to {_MAX_ENTRIES} patches along a side")


def require_patches(patches: int, of_what: str) -> None:
    """Raise ModelError for settings that lead to images of too many patches."""
    if patches > MAX_PATCHES:
        raise ModelError(
            f"{SETTINGS_FILE}: {of_what} may be cut into {patches} patches, which is more than {MAX_PATCHES}: make it "
            "smaller"
        )


def rows_of_blocks(blocks: int, merge: int) -> int:
    """The most patches of an image of about as many blocks of `merge` x `merge`, when its sides are rounded up.

    The longer side is at most 200 times the shorter one.
    """
    sides = math.ceil(15 * math.sqrt(blocks)) + 16  # of the two together, in blocks
    return (blocks + sides) * merge**2
