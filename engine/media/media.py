"""Media: an image or a video as the model's processor made it, and where its embeddings stand in a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Modality: TypeAlias = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class MediaFiles:
    """What a request sends for one medium: the bytes of a file, or of one for each frame of a video.

    There are `fps` frames in a second if each has a file.
    """

    files: tuple[bytes, ...]
    modality: Modality = "image"
    fps: float = 1.0

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(map(len, self.files))


@dataclass(frozen=True, slots=True)
class Media:
    """An image or a video that was decoded and resized for a model.

    `tiles` are parts of an image, or the frames of a video, as the tower takes them, each `[height, width, 3]`, before
    rescaling and normalizing. `layout` is what its family needs to know of their arrangement: tuples, named tuples of
    `engine/media`, numbers and texts. `digest` names the content: tiles, their shapes and the processor's settings.
    `width` and `height` are of the image as it was sent, upright.
    """

    tiles: tuple[NDArray[np.uint8], ...]
    layout: Any
    num_tokens: int
    digest: bytes
    width: int
    height: int
    modality: Modality = "image"


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
