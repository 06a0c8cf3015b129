"""Tool calls in a model's text: the Hermes format, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from tidewheel.server.chat.pieces import CallArguments, CallStart, Piece

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class ToolCallParser(Protocol):
    """Splits one choice's text, as it arrives, into text for the user and tool calls, in their order."""

    def feed(self, text: str) -> list[Piece]:
        """What became certain with `text`."""

    def finish(self) -> list[Piece]:
        """What was held back, once no more text comes."""


class HermesParser:
    """The Hermes format, which Qwen and many others share.

    Text that may become a tag is held back, and so is white space that may lead to one, so that the pieces of a
    stream add up to what the whole text gives. What is not a call after all is passed on as text, tags included.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._inside = False  # _pending starts after OPEN
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        """What became certain with `text`."""
        self._pending += text
        parts: list[Piece] = []
        while True:
            if self._inside:
                body, tag, rest = self._pending.partition(CLOSE)
                if not tag:
                    return parts
                parts += self._call_or_text(body, CLOSE)
                self._pending, self._inside = rest, False
            before, tag, rest = self._pending.partition(OPEN)
            if not tag:
                break
            if before := before.rstrip():
                parts.append(before)
            self._pending, self._inside = rest, True
        safe = len(self._pending) - _held_back(self._pending)
        if safe:
            parts.append(self._pending[:safe])
            self._pending = self._pending[safe:]
        return parts

    def finish(self) -> list[Piece]:
        """What was held back, once no more text comes. A model may stop where the closing tag was due."""
        pending, self._pending = self._pending, ""
        if self._inside:
            self._inside = False
            return self._call_or_text(pending, "")
        if not pending or (self._num_calls and pending.isspace()):
            return []
        return [pending]

    def _call_or_text(self, body: str, closing: str) -> list[Piece]:
        call = _parse_call(body)
        if call is None:
            return [OPEN + body + closing]
        name, arguments = call
        index, self._num_calls = self._num_calls, self._num_calls + 1
        return [CallStart(index, f"call_{uuid.uuid4().hex[:24]}", name), CallArguments(index, arguments)]


def _parse_call(body: str) -> tuple[str, str] | None:
    try:
        call: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def _held_back(text: str) -> int:
    """How many of the last characters may turn out to be white space and a tag."""
    tag = next((k for k in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:k])), 0)
    before_tag = text[: len(text) - tag]
    return tag + len(before_tag) - len(before_tag.rstrip())


TOOL_CALL_PARSERS: dict[str, Callable[[], ToolCallParser]] = {"hermes": HermesParser}
"""The parsers that `--tool-call-parser` names."""
