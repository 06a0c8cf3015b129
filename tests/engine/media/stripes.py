"""A small vision of our own: an image is a stripe of pixels, each of which becomes a row."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from tidewheel.engine.devices.tower import Rows, TowerExecutor
from tidewheel.engine.media.media import Media
from tidewheel.engine.media.picture import Picture
from tidewheel.engine.media.vision import Expansion, Vision
from tidewheel.engine.models.spec import ProjectionSpec, TowerSpec
from tidewheel.engine.models.tensor_ref import TensorRef

WIDTH = 4  # of rows


class StripesVision(Vision):
    """Each pixel of an image of one row is a token."""

    placeholder = "<image>"
    slot = "<pixel>"
    max_rows = 1024
    settings = "stripes"

    def __init__(self, *, two_way: bool = False, axes: bool = False, hidden_size: int = WIDTH) -> None:
        self.two_way = two_way
        self._axes = axes
        self.spec = TowerSpec(hidden_size, (), (("pixels", ProjectionSpec(3, hidden_size)),))
        self.tensors = {"pixels.weight": (TensorRef("pixels.weight"),)}

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        image = picture.pixels
        if image.shape[0] * image.shape[1] > self.max_rows:
            raise ValueError(f"an image has at most {self.max_rows} pixels")
        return (Picture(image.reshape(1, -1, 3)),), image.shape[0] * image.shape[1]

    def num_tokens(self, layout: Hashable) -> int:
        assert isinstance(layout, int)
        return layout

    def expansion(self, layout: Hashable) -> Expansion:
        return Expansion(f"[{self.slot}]", (self.num_tokens(layout),))

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        pixels = media.tiles[0].reshape(-1, 3).astype(np.float32) / np.float32(255)
        return (yield from tower.project("pixels", pixels))

    def positions(self, layouts: Sequence[Hashable]) -> list[NDArray[np.int32]] | None:
        """In rows of three."""
        if not self._axes:
            return None
        counts = [np.arange(self.num_tokens(layout), dtype=np.int32) for layout in layouts]
        return [np.stack([np.zeros_like(count), count // 3, count % 3]) for count in counts]


def picture(num_tokens: int, seed: int = 0) -> Media:
    """An image of so many random pixels."""
    tile = np.random.default_rng(seed).integers(0, 256, (1, num_tokens, 3), np.uint8)
    digest = tile.tobytes()[:32].ljust(32, b"\0")
    return Media((tile,), num_tokens, num_tokens, digest, num_tokens, 1)
