"""Messages in the form that a template reads, and whether its text shows what the user said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.engine.media.media import Modality
from tidewheel.engine.media.words import occurrences

from ..protocol.chat import ContentPart, Message
from .image_placeholders import IMAGE, MARKS, VIDEO, ReadImage
from .template_reading import TemplateReading

_EACH_MARK = tuple(MARKS.values())
_TELLING = 16  # characters; a shorter text may stand in a prompt by chance
# Private-use characters, which conversations do not contain and templates do not change.
_MARK = "\U0010fffe\U0010fffd\U0010fffe"


IMAGE_PART = {"type": "image"}
"""What almost all templates take for an image."""
IMAGE_URL_PART = {"type": "image_url", "image_url": {"url": ""}}
_VIDEO_PART = {"type": "video"}


def with_reasoning(messages: Sequence[Mapping[str, Any]], reading: TemplateReading) -> list[dict[str, Any]]:
    """The messages with reasoning where the template reads it."""
    written = []
    for message in messages:
        moved = dict(message)
        reasoning = moved.pop("reasoning_content", None)
        if reasoning is None:
            pass
        elif reading.thinking_parts:
            thought = {"type": "thinking", "thinking": reasoning, "closed": True}
            moved["content"] = [thought, *_text_parts([moved["content"]])]
        elif reading.thought_blocks:
            said = [{"type": "response", "text": moved["content"]}] if moved["content"] else []
            moved["content"] = {"blocks": [{"type": "thoughts", "text": reasoning}, *said]}
        else:
            moved[reading.reasoning] = reasoning
        written.append(moved)
    return written


def with_parts(
    rendered: Sequence[Mapping[str, Any]],
    messages: Sequence[Message] | None,
    *,
    image: Mapping[str, Any] = IMAGE_PART,
    only_with_images: bool = False,
) -> list[dict[str, Any]]:
    """The rendered messages with contents as lists of parts: the request's own parts if they come from `messages`.

    `image` is the part for each image. `only_with_images` leaves the contents of messages without media as they are.
    """
    written = []
    for i, text in enumerate(rendered):
        content = text["content"]
        if isinstance(content, str) and (has_marks(content) or not only_with_images):
            parts = None if messages is None else messages[i].content
            given = parts if isinstance(parts, list) else ()
            texts = [part.mark if isinstance(part, ReadImage) else part.text or "" for part in given if _is_shown(part)]
            if "\n".join(texts) != content:  # it was written otherwise
                texts = _around_marks(content)
            content = _text_parts(texts, image)
        written.append({**text, "content": content})
    return written


def with_placeholders(
    rendered: Sequence[Mapping[str, Any]], placeholders: Mapping[Modality, str], *, in_place: bool
) -> list[dict[str, Any]]:
    """The messages with contents as texts that have a placeholder for each medium: `in_place`, or before all texts."""
    by_mark = {MARKS[kind]: placeholder for kind, placeholder in placeholders.items()}
    written = []
    for message in rendered:
        text = message["content"]
        if isinstance(text, str) and has_marks(text):
            pieces = _around_marks(text)
            if not in_place:
                pieces.sort(key=lambda piece: piece not in by_mark)
            text = "\n".join(by_mark.get(piece, piece) for piece in pieces if piece)
        written.append({**message, "content": text})
    return written


def with_images_of_tools(rendered: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the media of tools' results in a user's message behind these: not every template shows them
    in a result.
    """
    written: list[dict[str, Any]] = []
    marks: list[str] = []
    for message in (*rendered, None):
        is_result = message is not None and message["role"] == "tool"
        if not is_result and marks:
            written.append({"role": "user", "content": "\n".join(marks)})
            marks = []
        if message is None:
            break
        if is_result:
            pieces = _around_marks(message["content"])
            marks += [piece for piece in pieces if piece in _EACH_MARK]
            said = "\n".join(piece for piece in pieces if piece and piece not in _EACH_MARK)
            message = {**message, "content": said or "[an image, which follows]"}
        written.append(dict(message))
    return written


def left_out(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether a prompt's text may be without what the last user message says.

    It is certain only if this is False: templates may write the message in another way.
    """
    at = _last_said(messages)
    if at is None:
        return False
    said = [piece.strip() for piece in _texts(messages[at]["content"])]
    if any(len(piece) < _TELLING for piece in said if piece) or any(piece not in text for piece in said):
        return True
    others = (other for i, message in enumerate(messages) if i != at for other in _texts(message["content"]))
    return any(piece in other for other in others for piece in said if piece)


def without_user_text(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The messages with a mark in place of what the last user message says, and the mark."""
    marked, at = list(messages), _last_said(messages)
    assert at is not None
    content = messages[at]["content"]
    marked[at] = {**messages[at], "content": _MARK if isinstance(content, str) else _text_parts([_MARK])}
    return marked, _MARK


def _last_said(messages: Sequence[Mapping[str, Any]]) -> int | None:
    """The index of the last user message with a text."""
    for at in range(len(messages) - 1, -1, -1):
        if messages[at]["role"] == "user" and any(map(str.strip, _texts(messages[at]["content"]))):
            return at
    return None


def _texts(content: str | Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content["blocks"] if isinstance(content, Mapping) else content
    return [part["text"] for part in parts if "text" in part]


def _text_parts(texts: Sequence[str], image: Mapping[str, Any] = IMAGE_PART) -> list[dict[str, Any]]:
    parts = {IMAGE: image, VIDEO: _VIDEO_PART}
    return [dict(parts.get(text) or {"type": "text", "text": text}) for text in texts if text]


def _is_shown(part: ContentPart) -> bool:
    return part.text is not None or isinstance(part, ReadImage)


def has_marks(text: str) -> bool:
    """Whether a text has media."""
    return any(mark in text for mark in _EACH_MARK)


def _around_marks(text: str) -> list[str]:
    """A text in pieces, of which some are marks; line ends beside those only join the pieces."""
    places = sorted((at, mark) for mark in _EACH_MARK for at in occurrences(text, mark))
    pieces: list[str] = []
    end = 0
    for at, mark in places:
        pieces += (text[end:at], mark)
        end = at + len(mark)
    pieces.append(text[end:])
    for i in range(1, len(pieces), 2):
        pieces[i - 1] = pieces[i - 1].removesuffix("\n")
        pieces[i + 1] = pieces[i + 1].removeprefix("\n")
    return pieces
