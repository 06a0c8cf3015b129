"""Vision: how a family of models sees images and videos. One file in `families` for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..declaring.record import record
from ..devices.tower import Rows, TowerExecutor
from ..models.spec import TowerSpec
from ..models.tensor_ref import TensorRef
from .frames import Frames
from .media import Media, MediaSpan, Modality
from .picture import Picture


class Marks(NamedTuple):
    """What the chat template writes for a medium, and the token that its embeddings take the place of."""

    placeholder: str
    slot: str


@record(frozen=True, slots=True)
class Expansion:
    """What stands for an image in a prompt: text with `len(counts)` slots, of which the i-th is `counts[i]` tokens.

    A slot is the `slot` of the medium's marks, written once. The counts add up to the medium's embeddings.
    """

    text: str
    counts: tuple[int, ...]


class Vision(ABC):
    """How a model sees images: from pixels to rows in place of tokens. It has no weights; a TowerExecutor has them.

    `tensors` has the keys of `tower_shapes(spec)`. `placeholder` is what the model's chat template writes for an image,
    and `slot` the token that embeddings take the place of. With `two_way`, tokens of an image see all of that image.
    `numbering` is written before an image's expansion, with its number in the prompt, from 0, in place of {}. A prompt
    without placeholders may have `numbered` instead, with the images' numbers from 1, in their order.
    `added_after`: the layers of the decoder after which something is added to an image's rows.
    The decoder multiplies embeddings by `embedding_multiplier`, those of images too. With `places_tokens_around`, the
    token before a slot has a position of its own, and so may some behind it.
    `settings` names everything that the pixels depend on, and `max_rows` is the most that a segment of a layer has.

    With `video`, the model takes videos, too: those are what stands for them. `request_fields` are the settings of the
    processor that a request may change: they decide sizes alone, so that the layout says all that follows from them.
    """

    spec: TowerSpec
    tensors: Mapping[str, tuple[TensorRef, ...]]  # alternatives: the first that the checkpoint has counts
    placeholder: str
    slot: str
    numbering: str = ""
    numbered: str = ""
    two_way: bool = False
    added_after: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    places_tokens_around: bool = False
    settings: Hashable
    max_rows: int
    video: Marks | None = None
    request_fields: frozenset[str] = frozenset()

    @property
    def marks(self) -> Mapping[Modality, Marks]:
        """What stands for media of each kind that the model takes."""
        images: dict[Modality, Marks] = {"image": Marks(self.placeholder, self.slot)}
        return images if self.video is None else {**images, "video": self.video}

    def fields_of_tokens(self, least: int | None, most: int | None) -> Mapping[str, Any]:
        """The settings of the processor with which an image has about so many tokens. Raises ValueError if none do."""
        raise ValueError("the model's image processor does not count tokens")

    @abstractmethod
    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        """Tiles and layout of an image, as Media has them.

        Raises ValueError for an image of a size that the model does not take. Runs in a process of its own, for which
        the Vision is pickled.
        """

    def process_video(self, frames: Frames) -> tuple[tuple[Picture, ...], Hashable]:
        """The same of a video. Raises ValueError if the model takes none, or none of this size."""
        raise ValueError("this model takes no videos")

    @abstractmethod
    def num_tokens(self, layout: Hashable) -> int:
        """How many embeddings an image of this layout has."""

    @abstractmethod
    def expansion(self, layout: Hashable) -> Expansion:
        """What takes the place of `placeholder` in the prompt's text."""

    @abstractmethod
    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        """The image's embeddings `[num_tokens, (1 + layers) * hidden]`, piece by piece: see TowerExecutor.

        `hidden` is the decoder's. What is added after its layers comes behind the embedding, as `added_after` has them.
        """

    def positions(self, layouts: Sequence[Hashable]) -> list[NDArray[np.int32]] | None:
        """For rope by sections: for each image, the positions `[3, num_tokens]` (time, height, width) of its tokens.

        They count from the image's first position. The text behind it goes on one after the largest of them. None:
        images take positions as text does.
        """
        return None

    def prompt_positions(self, spans: Sequence[MediaSpan], token_ids: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """The same for all tokens of a prompt, `[3, T]`, given its media in order: a span for each image."""
        relative = self.positions([span.media.layout for span in spans])
        if relative is None:
            return None
        positions = np.empty((3, len(token_ids)), np.int32)
        next_position, token = 0, 0
        for span, counted in zip(spans, relative, strict=True):
            text = span.start - token
            positions[:, token : span.start] = np.arange(next_position, next_position + text)
            own = counted[:, span.first_row : span.first_row + span.length]
            positions[:, span.start : span.end] = own + (next_position + text)
            next_position += text + int(own.max()) + 1
            token = span.end
        positions[:, token:] = np.arange(next_position, next_position + len(token_ids) - token)
        return positions
