"""What stands for media in a conversation's text: marks, placeholders, and texts of clients that look like them.

A client's text may contain the words that a template writes for an image. While a prompt is rendered, they are broken
by a character that conversations do not contain, so that only the template's own ones are counted and replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tidewheel.engine.media.media import Media, MediaSpan, Modality
from tidewheel.engine.media.words import occurrences
from tidewheel.engine.text.tokenizer import Tokenizer

from ..errors import ApiError, bad_request
from ..protocol.chat import ContentPart, Message

if TYPE_CHECKING:
    from tidewheel.engine.media.placeholders import ExpandedPrompt
    from tidewheel.engine.media.reader import MediaReader

T = TypeVar("T")

# Private-use characters, which conversations do not contain and templates do not change.
IMAGE, VIDEO = "\U0010fffcimage\U0010fffc", "\U0010fffcvideo\U0010fffc"
"""They mark an image and a video in a message's text."""
MARKS: Mapping[Modality, str] = {"image": IMAGE, "video": VIDEO}
_BREAK = "\U0010fffb"
_FOREIGN = -1  # in place of a slot's token that a client has written


class ReadImage(ContentPart, kw_only=True):
    """A part that is an image or a video, fetched and decoded. No body is decoded to it."""

    media: Media

    @property
    def mark(self) -> str:
        """What marks it in a message's text."""
        return MARKS[self.media.modality]


def images_of(messages: Sequence[Message]) -> list[Media]:
    """The images of a conversation, in their order."""
    return [
        part.media
        for message in messages
        if isinstance(message.content, list)
        for part in message.content
        if isinstance(part, ReadImage)
    ]


class PromptImages:
    """The images of a prompt. `text` has a slot in place of each of their runs of tokens."""

    def __init__(self, reader: MediaReader, slot_ids: Mapping[str, int], expanded: ExpandedPrompt) -> None:
        self.text = expanded.text.replace(_BREAK, "")
        self._reader = reader
        self._slot_ids = slot_ids
        self._expanded = expanded
        words = [(word, is_own) for slot in slot_ids for word, is_own in ((slot, True), (_broken(slot), False))]
        found = [(at, is_own) for word, is_own in words for at in occurrences(expanded.text, word)]
        self._is_own = [is_own for _, is_own in sorted(found)]
        self.num_more_tokens = expanded.num_added_tokens
        """How many tokens `spread` adds."""

    def spread(self, token_ids: Sequence[int]) -> tuple[list[int], tuple[MediaSpan, ...]]:
        """The token ids of `text` with all tokens of the images, and where these are.

        Raises ApiError (400) if the text becomes other slots than it has.
        """
        ids = list(token_ids)
        slots = set(self._slot_ids.values())
        places = [i for i, token in enumerate(ids) if token in slots]
        if len(places) != len(self._is_own):
            raise _confusing(" or ".join(self._slot_ids))
        foreign = [*compress(places, [not is_own for is_own in self._is_own])]
        written = [ids[place] for place in foreign]
        for place in foreign:
            ids[place] = _FOREIGN
        spread, spans = self._reader.spread(ids, self._expanded)
        if foreign:
            rest = iter(written)
            spread = [next(rest) if token == _FOREIGN else token for token in spread]
        return spread, spans


class ImagePlaceholders:
    """What a model's prompts have in place of images, until they are expanded."""

    def __init__(self, reader: MediaReader, tokenizer: Tokenizer) -> None:
        self.texts: Mapping[Modality, str] = {kind: marks.placeholder for kind, marks in reader.marks.items()}
        """What a template writes for a medium of each kind."""
        self._reader = reader
        self._slot_ids: dict[str, int] = {}
        for _, slot in reader.marks.values():
            slot_id = tokenizer.token_to_id(slot)
            assert slot_id is not None, "a reader's slots are tokens"
            self._slot_ids[slot] = slot_id
        self._words = tuple(dict.fromkeys((*MARKS.values(), *self.texts.values(), *self._slot_ids)))

    def without(self, value: T) -> T:
        """The same value, with all in its texts broken that looks like an image."""
        return _each_text(value, self._without)  # type: ignore[no-any-return]

    def restored(self, text: str) -> str:
        """A text as it was before `without`."""
        return text.replace(_BREAK, "")

    def expanded(self, text: str, media: Sequence[Media]) -> PromptImages:
        """A rendered text with a placeholder for each medium. Raises InvalidRequestError for another number of them."""
        return PromptImages(self._reader, self._slot_ids, self._reader.expand(text, media, "messages"))

    def _without(self, text: str) -> str:
        for word in self._words:
            if word in text:
                text = text.replace(word, _broken(word))
        return text


def _broken(word: str) -> str:
    return word[0] + _BREAK + word[1:]


def _each_text(value: Any, change: Any) -> Any:
    """A value of a request's body with all texts in it changed. What has none is not copied."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_text(item, change) for item in value]
    if isinstance(value, dict):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    if isinstance(value, ReadImage) or not isinstance(value, msgspec.Struct):
        return value
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    changed = {name: _each_text(field, change) for name, field in fields.items()}
    return msgspec.structs.replace(value, **changed)


def _confusing(slot: str) -> ApiError:
    return bad_request(
        f"messages: a text has {slot}, which stands for an image in this model's prompts, in a form that cannot be "
        "told from an image; leave it out, or send no images with it",
        "messages",
    )
