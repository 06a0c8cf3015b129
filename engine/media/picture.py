"""Picture: an image in RGB, in Pillow's memory or in an array."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

_STRIP_PIXELS = 2**17  # converted at a time, within a core's caches


def strips_of(height: int, width: int) -> Iterator[tuple[int, int]]:
    """Of an image, the first row of each strip, and the row behind its last one."""
    rows = max(1, _STRIP_PIXELS // max(width, 1))
    for top in range(0, height, rows):
        yield top, min(top + rows, height)


class Picture:
    """An image in RGB, as Pillow or an array `[height, width, 3]` has it. The other is made where it is asked for."""

    def __init__(self, source: PillowImage | NDArray[np.uint8]) -> None:
        if isinstance(source, np.ndarray):
            self.pixels = source
            self.shape: tuple[int, ...] = source.shape
        else:
            self.image = source
            self.shape = source.height, source.width, 3

    @cached_property
    def image(self) -> PillowImage:
        """The image in Pillow."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    @cached_property
    def pixels(self) -> NDArray[np.uint8]:
        """The image as an array `[height, width, 3]`."""
        pixels = np.empty(self.shape, np.uint8)
        rows, top = pixels.reshape(-1), 0
        for strip in self.strips():
            rows[top : top + len(strip)] = np.frombuffer(strip, np.uint8)
            top += len(strip)
        return pixels

    def strips(self) -> Iterator[bytes]:
        """The bytes of `pixels`, some rows at a time: a copy of all of them would take more time and memory."""
        height, width = self.shape[:2]
        for top, bottom in strips_of(height, width):
            if "pixels" in self.__dict__:
                yield self.pixels[top:bottom].tobytes()
            else:
                yield self.image.crop((0, top, width, bottom)).tobytes()
