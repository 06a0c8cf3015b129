"""Calls in OpenAI's harmony format: messages to functions, one a turn, for `<|call|>` ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...protocol.chat import Tool
from ..harmony import CHANNEL, CONSTRAIN, MESSAGE, TAGS, HarmonyScanner
from .call_format import CallFormat
from .parser import ToolParser

_BEFORE = (
    f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}",
    f" to=functions.NAME{CHANNEL}commentary json{MESSAGE}",
)


class HarmonyToolParser(ToolParser, HarmonyScanner):
    """gpt-oss. Reasoning becomes text here: HarmonyParser tells it apart."""

    markers = TAGS
    # The stop token behind a call is not part of it: the model may choose which one.
    call_formats = tuple(CallFormat(before, at_most=1) for before in _BEFORE)

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self.new_call_id = self._new_id
