"""Media: an image as the model's processor made it, and where its embeddings stand in a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Media:
    """An image that was decoded and resized for a model.

    `tiles` are its parts as the tower takes them, each `[height, width, 3]`, before rescaling and normalizing. `layout`
    is what its family needs to know of their arrangement: tuples, named tuples of `engine/media`, numbers and texts.
    `digest` names the content: tiles, their shapes and the processor's settings. `width` and `height` are of the image
    as it was sent, upright.
    """

    tiles: tuple[NDArray[np.uint8], ...]
    layout: Any
    num_tokens: int
    digest: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Tokens `[start, start + length)` of a prompt that rows of a medium's embeddings take the place of.

    Row `first_row + i` is the embedding of token `start + i`.
    """

    media: Media
    start: int
    length: int
    first_row: int = 0

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.length
