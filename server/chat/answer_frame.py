"""Answers between tags as grammars: what a grammar demands stands between them, or without them."""

from __future__ import annotations

from collections.abc import Sequence

from tidewheel.engine.constraints.structural_tag import (
    Alternatives,
    Concatenation,
    ConstString,
    EmbeddedGrammar,
    Format,
    JsonSchema,
    Regex,
)

from ..generation.token_constraints import Frame

_KNOW_THEIR_END = (ConstString, EmbeddedGrammar, JsonSchema, Regex)


def answer_frame(tags: Sequence[tuple[str, str]]) -> Frame:
    """The frame of an answer between one of these pairs of tags. Before calls there may be an empty answer."""
    begin = Alternatives([ConstString(""), *(_header(begin) for begin, _ in tags if begin)])
    end = Alternatives([ConstString(""), *(ConstString(end) for end in dict.fromkeys(end for _, end in tags))])
    empty = Alternatives(
        [ConstString(""), *(Concatenation([_header(begin), ConstString(end)]) for begin, end in tags if begin)]
    )

    def frame(content: Format | None, calls: Format | None) -> Format:
        ways: list[Format] = []
        if content is not None:
            ways.append(Concatenation([begin, content, *([end] if isinstance(content, _KNOW_THEIR_END) else [])]))
        if calls is not None:
            ways.append(Concatenation([empty, calls]))
        return Alternatives(ways)

    return frame


def _header(text: str) -> Format:
    """A text whose recipient stands apart, as in calls: a grammar does not go back within one piece of text."""
    before, to, recipient = text.partition(" to=")
    return Concatenation([ConstString(part) for part in (before, to + recipient) if part])
