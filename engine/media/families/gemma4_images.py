"""What all Gemma 4 models do with images: they keep their aspect ratio and get as many tokens as a budget allows."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

from ...models.config import ConfigReader
from ...models.text_part import text_part, two_way
from ..picture import Picture
from ..processing import resize
from ..vision import Expansion, Vision
from .settings import BICUBIC, ProcessorSettings, part_of, require_patches, square

ZERO, ONE = (0.0,) * 3, (1.0,) * 3
_BUDGETS = (70, 140, 280, 560, 1120)  # tokens of an image
_MAX_MERGE = 16


class Gemma4Images(Vision):
    """An image is enlarged or shrunk to at most `max_soft_tokens` blocks of `merge` x `merge` patches.

    A block becomes one embedding. The layout is the rows and columns of blocks.
    """

    placeholder = "<|image|>"
    slot = "<|image|>"
    request_fields = frozenset({"max_soft_tokens"})

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self.tower_config, self.processor = part_of(config, "vision_config"), ProcessorSettings(processor)
        tower, settings = self.tower_config, self.processor
        self.patch, self.merge = square(tower, "patch_size", 16), tower.integer("pooling_kernel_size", 3)
        if self.merge > _MAX_MERGE:
            raise tower.error("pooling_kernel_size", f"at most {_MAX_MERGE}")
        for name, ours, default in (("patch_size", self.patch, 16), ("pooling_kernel_size", self.merge, 3)):
            if settings.integer(name, default) != ours:
                raise settings.error(name, f"{ours}, as the vision_config of config.json has it")
        self.most_tokens = settings.integer("max_soft_tokens", 280)
        if self.most_tokens not in _BUDGETS:
            raise settings.error("max_soft_tokens", f"one of {', '.join(map(str, _BUDGETS))}")
        require_patches(self.most_tokens * self.merge**2, "an image of max_soft_tokens")
        self.text_config = ConfigReader(text_part(architecture, config), "config.json: text_config")
        self.two_way = two_way(architecture, text_part(architecture, config))
        if self.text_config.raw("hidden_size_per_layer_input") != 0:
            self.text_config.refuse("pad_token_id", 0)  # whose per-layer embeddings tokens of images have
        self._resample = settings.resample(BICUBIC)
        self.sizes = self.patch, self.merge, self.most_tokens, self._resample

    def fields_of_tokens(self, least: int | None, most: int | None) -> Mapping[str, Any]:
        fitting = [budget for budget in _BUDGETS if (least or 0) <= budget <= (most or budget)]
        if not fitting:
            raise ValueError(f"the model's images have at most {', '.join(map(str, _BUDGETS))} tokens, and none fits")
        return {"max_soft_tokens": min(fitting, key=lambda budget: abs(budget - self.most_tokens))}

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        rows, columns = self._blocks(*picture.shape[:2])
        side = self.patch * self.merge
        return (resize(picture, rows * side, columns * side, self._resample),), (rows, columns)

    def _blocks(self, height: int, width: int) -> tuple[int, int]:
        """As many rows and columns as the budget allows, in about the image's ratio."""
        side = self.patch * self.merge
        factor = math.sqrt(self.most_tokens * self.merge**2 * self.patch**2 / (height * width))
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if not rows:  # so narrow that the budget is used up by one row
            return 1, self.most_tokens
        return (rows, columns) if columns else (self.most_tokens, 1)

    def num_tokens(self, layout: Hashable) -> int:
        rows, columns = blocks_of(layout)
        return rows * columns

    def expansion(self, layout: Hashable) -> Expansion:
        return Expansion(f"<|image>{self.slot}<image|>", (self.num_tokens(layout),))


def blocks_of(layout: Hashable) -> tuple[int, int]:
    """The layout of an image: rows and columns of blocks."""
    assert isinstance(layout, tuple)
    return layout[0], layout[1]


def require_sides(config: ConfigReader, name: str, entries: int, most: int) -> None:
    """Raise ModelError for tables of positions whose `entries` are fewer than an image may have rows or columns."""
    if entries < most:
        raise config.error(name, f"at least {most}, which is how long an image of max_soft_tokens may be")
