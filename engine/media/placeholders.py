"""Placeholders: the text and the tokens that stand for the images of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import InvalidRequestError, quoted
from .media import Media, MediaSpan
from .vision import Vision


class Slot(NamedTuple):
    """A token of an expanded prompt, which stands for `length` embeddings of an image, from `first_row` on."""

    media: Media
    length: int
    first_row: int


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt's text in which images have their slots, each written once, and what these stand for, in order.

    `param` is the request's field that the prompt is made of.
    """

    text: str
    slots: tuple[Slot, ...]
    param: str

    @property
    def num_added_tokens(self) -> int:
        """How many tokens `spread` adds. To be compared with the context before it does."""
        return sum(slot.length - 1 for slot in self.slots)


def expand(vision: Vision, text: str, media: Sequence[Media], param: str) -> ExpandedPrompt:
    """The text with the expansions of `media` in place of the placeholders, in order.

    Raises InvalidRequestError if there are more or fewer placeholders than images.
    """
    found = text.count(vision.placeholder)
    if found > len(media):
        raise _marker_in_text(vision.placeholder, param)
    if found < len(media):
        raise InvalidRequestError(
            f"{param} has {len(media)} images, of which the model's chat template shows {found}: it may take them "
            "only in messages of users",
            param,
        )
    first, *others = text.split(vision.placeholder)
    pieces, slots = [first], []
    for image, after in zip(media, others, strict=True):
        expansion = vision.expansion(image.layout)
        row = 0
        for length in expansion.counts:
            slots.append(Slot(image, length, row))
            row += length
        pieces += (expansion.text, after)
    return ExpandedPrompt("".join(pieces), tuple(slots), param)


def spread(
    vision: Vision, slot_id: int, token_ids: Sequence[int], expanded: ExpandedPrompt
) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """The prompt's tokens, each slot as often as it has embeddings, and where these stand.

    `token_ids` are those of the expanded text, and `slot_id` is the token of `vision.slot`. Raises InvalidRequestError
    if it occurs elsewhere, too.
    """
    if token_ids.count(slot_id) != len(expanded.slots):
        raise _marker_in_text(vision.slot, expanded.param)
    ids: list[int] = []
    spans = []
    begin = 0
    for slot in expanded.slots:
        at = token_ids.index(slot_id, begin)
        ids += token_ids[begin:at]
        if slot.length:
            spans.append(MediaSpan(slot.media, len(ids), slot.length, slot.first_row))
            ids += [slot_id] * slot.length
        begin = at + 1
    ids += token_ids[begin:]
    return ids, tuple(spans)


def _marker_in_text(marker: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} contains {quoted(marker)} besides its images: the model's own image marker, which texts may not have",
        param,
    )
