"""Messages in the form that a template reads, and whether its text shows what the user said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..protocol.chat import ContentPart, Message
from .image_placeholders import IMAGE, ReadImage
from .template_reading import TemplateReading

_TELLING = 16  # characters; a shorter text may stand in a prompt by chance
# Private-use characters, which conversations do not contain and templates do not change.
_MARK = "\U0010fffe\U0010fffd\U0010fffe"


IMAGE_PART = {"type": "image"}
"""What almost all templates take for an image."""
IMAGE_URL_PART = {"type": "image_url", "image_url": {"url": ""}}


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

    `image` is the part for each image. `only_with_images` leaves the contents of messages without any as they are.
    """
    written = []
    for i, text in enumerate(rendered):
        content = text["content"]
        if isinstance(content, str) and (IMAGE in content or not only_with_images):
            parts = None if messages is None else messages[i].content
            given = parts if isinstance(parts, list) else ()
            texts = [IMAGE if isinstance(part, ReadImage) else part.text or "" for part in given if _is_shown(part)]
            if "\n".join(texts) != content:  # it was written otherwise
                texts = _around_images(content)
            content = _text_parts(texts, image)
        written.append({**text, "content": content})
    return written


def with_placeholders(
    rendered: Sequence[Mapping[str, Any]], placeholder: str, *, in_place: bool
) -> list[dict[str, Any]]:
    """The messages with contents as texts that have `placeholder` for each image: `in_place`, or before all texts."""
    written = []
    for message in rendered:
        text = message["content"]
        if isinstance(text, str) and IMAGE in text:
            pieces = _around_images(text)
            if not in_place:
                pieces.sort(key=lambda piece: piece != IMAGE)
            text = "\n".join(placeholder if piece == IMAGE else piece for piece in pieces if piece)
        written.append({**message, "content": text})
    return written


def with_images_of_tools(rendered: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the images of tools' results in a user's message behind these: not every template shows them
    in a result.
    """
    written: list[dict[str, Any]] = []
    num_images = 0
    for message in (*rendered, None):
        is_result = message is not None and message["role"] == "tool"
        if not is_result and num_images:
            written.append({"role": "user", "content": "\n".join([IMAGE] * num_images)})
            num_images = 0
        if message is None:
            break
        if is_result:
            pieces = _around_images(message["content"])
            num_images += pieces.count(IMAGE)
            said = "\n".join(piece for piece in pieces if piece not in ("", IMAGE))
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
    return [dict(image) if text == IMAGE else {"type": "text", "text": text} for text in texts if text]


def _is_shown(part: ContentPart) -> bool:
    return part.text is not None or isinstance(part, ReadImage)


def _around_images(text: str) -> list[str]:
    """A text in pieces, of which some are IMAGE; line ends beside those only join the pieces."""
    # No regular expression: it would take Python's lock for as long as a long text is.
    first, *others = text.split(IMAGE)
    pieces = [first]
    for piece in others:
        pieces[-1] = pieces[-1].removesuffix("\n")
        pieces += (IMAGE, piece.removeprefix("\n"))
    return pieces
