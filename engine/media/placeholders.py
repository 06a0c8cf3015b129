"""Placeholders: the text and the tokens that stand for the media of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import InvalidRequestError, quoted
from .media import Media, MediaSpan, Modality
from .vision import Vision
from .words import occurrences


class Slot(NamedTuple):
    """A token of an expanded prompt, which stands for `length` embeddings of a medium, from `first_row` on."""

    media: Media
    length: int
    first_row: int


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt's text in which media have their slots, each written once, and what these stand for, in order.

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
    """The text with the expansions of `media` in place of the placeholders, those of each kind in order.

    Raises InvalidRequestError if there are more or fewer placeholders than media.
    """
    places = []
    for modality, marks in vision.marks.items():
        given = [medium for medium in media if medium.modality == modality]
        found = [(at, at + len(marks.placeholder)) for at in occurrences(text, marks.placeholder)]
        if not found and vision.numbered and modality == "image":
            found = _numbered_places(text, vision.numbered, len(given))
        if len(found) > len(given):
            raise _marker_in_text(marks.placeholder, param)
        if len(found) < len(given):
            if vision.numbered and modality == "image":
                _require_next(text, vision.numbered, len(found), len(given), param)
            raise InvalidRequestError(
                f"{param} has {len(given)} {modality}s, of which the model's chat template shows {len(found)}: it may "
                "take them only in messages of users",
                param,
            )
        places += [(*place, medium) for place, medium in zip(found, given, strict=True)]
    pieces: list[str] = []
    slots, end = [], 0
    for number, (begin, after, medium) in enumerate(sorted(places, key=lambda place: place[0])):
        expansion = vision.expansion(medium.layout)
        row = 0
        for length in expansion.counts:
            slots.append(Slot(medium, length, row))
            row += length
        pieces += (text[end:begin], vision.numbering.format(number), expansion.text)
        end = after
    pieces.append(text[end:])
    return ExpandedPrompt("".join(pieces), tuple(slots), param)


def spread(
    vision: Vision, slot_ids: Mapping[Modality, int], token_ids: Sequence[int], expanded: ExpandedPrompt
) -> tuple[list[int], tuple[MediaSpan, ...]]:
    """The prompt's tokens, each slot as often as it has embeddings, and where these stand.

    `token_ids` are those of the expanded text, and `slot_ids` the tokens of the slots of `vision.marks`. Raises
    InvalidRequestError if one occurs elsewhere, too.
    """
    expected = [slot_ids[slot.media.modality] for slot in expanded.slots]
    for modality, slot_id in slot_ids.items():
        if token_ids.count(slot_id) != expected.count(slot_id):
            raise _marker_in_text(vision.marks[modality].slot, expanded.param)
    ids: list[int] = []
    spans = []
    begin = 0
    for slot, slot_id in zip(expanded.slots, expected, strict=True):
        at = token_ids.index(slot_id, begin)
        ids += token_ids[begin:at]
        if slot.length:
            spans.append(MediaSpan(slot.media, len(ids), slot.length, slot.first_row))
            ids += [slot_id] * slot.length
        begin = at + 1
    ids += token_ids[begin:]
    return ids, tuple(spans)


def _numbered_places(text: str, numbered: str, count: int) -> list[tuple[int, int]]:
    """Where the marks with the numbers 1 to `count` begin and end, as far as they follow each other in this order."""
    found: list[tuple[int, int]] = []
    end = 0
    for number in range(1, count + 1):
        mark = numbered.format(number)
        at = text.find(mark, end)
        if at < 0:
            break
        end = at + len(mark)
        found.append((at, end))
    return found


def _require_next(text: str, numbered: str, found: int, count: int, param: str) -> None:
    """Raises InvalidRequestError, naming the mark that must follow `found` others, if any of the `count` is there."""
    if any(numbered.format(number) in text for number in range(1, count + 1)):
        raise InvalidRequestError(
            f"{param} has {count} images, but only {found} of their marks in the order of the numbers: "
            f"{quoted(numbered.format(found + 1))} must come next",
            param,
        )


def _marker_in_text(marker: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} contains {quoted(marker)} besides its images: the model's own image marker, which texts may not have",
        param,
    )
