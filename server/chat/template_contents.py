"""Messages in the form that a template reads, and whether its text shows what the user said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..protocol.chat import Message
from .template_reading import TemplateReading

_TELLING = 16  # characters; a shorter text may stand in a prompt by chance
# Private-use characters, which conversations do not contain and templates do not change.
_MARK = "\U0010fffe\U0010fffd\U0010fffe"


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


def with_parts(rendered: Sequence[Mapping[str, Any]], messages: Sequence[Message] | None) -> list[dict[str, Any]]:
    """The rendered messages with contents as lists of parts: the request's own parts if they come from `messages`."""
    written = []
    for i, text in enumerate(rendered):
        content = text["content"]
        if isinstance(content, str):
            parts = None if messages is None else messages[i].content
            given = parts if isinstance(parts, list) else ()
            texts = [part.text for part in given if part.text is not None]
            if "\n".join(texts) != content:  # it was written otherwise
                texts = [content]
            content = _text_parts(texts)
        written.append({**text, "content": content})
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


def _text_parts(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts if text]
