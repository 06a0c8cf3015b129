"""Answers in the harmony format as grammars: structured content goes into the message for the user."""

from __future__ import annotations

from tidewheel.engine.constraints.structural_tag import (
    Alternatives,
    AnyText,
    Concatenation,
    ConstString,
    Format,
    Tag,
)

from ..generation.token_constraints import Frame
from .harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START, HarmonyParser

_NOTHING = ConstString("")
_NEXT = f"{START}assistant"
_FINAL = Alternatives(
    [ConstString(f"{CHANNEL}final{MESSAGE}"), ConstString(f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}")]
)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
"""What begins a message of reasoning."""


def harmony_frame(begun: HarmonyParser) -> Frame:
    """The frame of an answer's content or calls, where `begun` has taken in the prompt, and nothing of the answer.

    There may be one message of reasoning before, if `begun` tells it apart from text.
    """
    place, reasons = begun.place, begun.gives_reasoning

    def frame(content: Format | None, calls: Format | None) -> Format:
        final = [] if content is None else [Concatenation([_FINAL, content])]
        answer = Alternatives([*final, *([] if calls is None else [calls])])
        if place == "text":  # which goes on, or ends at once for a call
            after_text = [] if calls is None else [Concatenation([ConstString(END + _NEXT), calls])]
            return Alternatives([*([] if content is None else [content]), *after_text])
        if place == "reasoning":
            return Concatenation([Tag("", AnyText(), END + _NEXT), answer])
        start = _NOTHING if place == "header" else ConstString(_NEXT)
        thought = [Tag(ANALYSIS, AnyText(), END + _NEXT)] if reasons else []
        return Concatenation([start, Alternatives([_NOTHING, *thought]), answer])

    return frame
