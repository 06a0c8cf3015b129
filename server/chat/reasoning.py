"""Reasoning in a model's text: what stands between two tags before the answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from .pieces import Piece
from .text_scanner import Steps, TextScanner

if TYPE_CHECKING:
    from tidewheel.engine.text.tokenizer import Tokenizer

    from .tools.parser import ToolCallParser


_CALL_BEGINS = "<tool_call"  # which may follow an answer


class ReasoningParser(TextScanner):
    """Splits one choice's text into reasoning and the rest. Used for models that reason only at the beginning.

    Models forget at times to close the reasoning before they call a function. So `calls`, a parser of its own for this,
    watches the reasoning. If it finds a call and the closing tag never comes, the reasoning ends where the call begins.
    Until that is certain, the call is held back.

    `begun` is the end of the prompt. A template may have opened the reasoning there, or closed it at once to keep the
    model from thinking. With `continues`, `begun` is the text that the model has already written in this turn. White
    space around the tags belongs to neither part.
    """

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    label: ClassVar[str] = ""
    """What the model writes behind the opening tag, as a part of it."""
    other_openings: ClassVar[tuple[str, ...]] = ()
    other_closings: ClassVar[tuple[str, ...]] = ()
    """Other ways in which models write the tags."""
    answer_tags: ClassVar[tuple[tuple[str, str], ...]] = ()
    """What may stand around the answer. It is left out."""
    wrappers: ClassVar[tuple[str, ...]] = ()
    """Tags that are left out wherever they stand, as no text has them."""
    specials: ClassVar[tuple[str, ...]] = ()
    """Special tokens that are parts of these tags."""
    repeats: ClassVar[bool] = False
    """Whether there may be reasoning behind the answer's beginning."""
    always_reasons: ClassVar[bool] = False
    """Whether a turn begins with reasoning although neither the prompt nor the model says so."""

    def __init__(self, begun: str, *, continues: bool = False, calls: ToolCallParser | None = None) -> None:
        super().__init__()
        self._watch = None if calls is None else _CallWatch(calls)
        begun = begun.rstrip()
        self._in_answer = next((end for tag, end in self.answer_tags if tag and begun.endswith(tag)), "")
        if self._in_answer and not continues:
            begun = next(begun.removesuffix(tag).rstrip() for tag, _ in self.answer_tags if begun.endswith(tag))
        self.is_open = self.always_reasons
        """Whether the text begins within reasoning."""
        self.is_over = False
        """Whether the reasoning, if any, has ended."""
        if continues:
            self.is_open = begun.rfind(self.opening) > begun.rfind(self.closing)
            self.is_over = not self.is_open and bool(begun)
        elif begun.endswith((self.opening, self.opening + self.label, *self.other_openings)):
            self.is_open = True
        elif begun.endswith(self.all_closings()):
            self.is_open, self.is_over = False, True
        self.has_reasoned = False
        """Whether there was any reasoning, in the prompt's tag or the model's."""
        self.ended_by = ""
        """The text from the first call on, if a call has ended the reasoning."""
        self.closed_by = self.closing
        """The tag that has ended the reasoning."""

    @classmethod
    def in_vocabulary(cls, tokenizer: Tokenizer) -> type[ReasoningParser]:
        """The parser for a model with this tokenizer, where its tags depend on that."""
        return cls

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        """The texts that the parser has to see, even where the tokenizer has them as special tokens."""
        answer = (tag for pair in cls.answer_tags for tag in pair)
        return (cls.opening, *cls.all_closings(), *answer, *cls.wrappers, *cls.specials)

    @classmethod
    def all_closings(cls) -> tuple[str, ...]:
        """All ways in which models end the reasoning."""
        return (cls.closing, *cls.other_closings)

    @property
    def is_done(self) -> bool:
        """Whether the text that follows has nothing for this parser."""
        return self.is_over and not self.wrappers and not self.answer_tags

    def _parse(self) -> Steps[None]:
        if not self.is_over:
            yield from self._spaces()
            if (yield from self._opens()) or self.is_open:
                self.has_reasoned = True
                yield from self._reasoning()
        self.is_over = True
        if self.wrappers:
            self._settle(0)
            while (yield from self._text_until(*self.wrappers)) is not None:
                self._settle()
        elif self.answer_tags:
            yield from self._answer()

    def _opens(self) -> Steps[bool]:
        for tag in (self.opening, *self.other_openings):
            if (yield from self._literal(tag)):
                return True
        return False

    def _answer(self) -> Steps[None]:
        """Gives an answer without the tags around it: one at its beginning, and the other at its end."""
        closing = self._in_answer
        if not closing:
            self._at = 0
            yield from self._spaces()
            for tag, end in self.answer_tags:
                if (yield from self._literal(tag)):
                    closing = end
                    break
        if not closing:
            self._at = 0
            return
        yield from self._spaces()
        self._settle()
        while (yield from self._text_until(closing)) is not None:
            behind = self._at
            yield from self._spaces()
            if not (yield from self._peek()):
                self._settle()
            elif (yield from self._literal(_CALL_BEGINS)):
                self._settle(behind)
            else:
                self._reject()

    def _reasoning(self) -> Steps[None]:
        yield from self._spaces()
        if self.label and (yield from self._literal(self.label)):
            yield from self._spaces()
        self._settle()
        watch, watched, searched = self._watch, 0, 0  # places in the unsettled text
        closings, longest = self.all_closings(), max(map(len, self.all_closings()))
        while True:
            found = [(place, tag) for tag in closings if (place := self._text.find(tag, searched)) >= 0]
            if found:
                end, self.closed_by = min(found)
                self._emit_reasoning(self._text[:end].rstrip())
                self._settle(end + len(self.closed_by))
                yield from self._spaces()
                self._settle()
                return
            certain = len(self._text) - self._held_back(closings)
            if watch is not None:
                certain = min(certain, watch.feed(self._text[watched:]))
                watch.drop(certain)
            self._emit_reasoning(self._text[:certain])
            self._settle(certain)
            watched, searched = len(self._text), max(0, len(self._text) - longest + 1)
            if not (yield from self._more()):
                called = watch is not None and watch.finish(cut_off=self._cut_off)
                end = watch.num_before if called and watch is not None else len(self._text)
                self._emit_reasoning(self._text[:end].rstrip())
                self._settle(end)
                self.ended_by = self._text.lstrip()
                return


class _CallWatch:
    """Finds the first call in a text. `num_before` characters at the text's beginning are certain to be before it."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._has_call = False
        self.num_before = 0

    def feed(self, text: str) -> int:
        """More of the text. Returns `num_before`."""
        self._take(self._parser.feed(text))
        return self.num_before

    def drop(self, count: int) -> None:
        """Let the text begin `count` characters later, of those before the call."""
        self.num_before -= count

    def finish(self, *, cut_off: bool) -> bool:
        """Whether the text has a call, when no more comes."""
        self._take(self._parser.finish(cut_off=cut_off))
        return self._has_call

    def _take(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if self._has_call:
                return
            if isinstance(piece, str):  # as it stands in the text; only white space before a call is left out
                self.num_before += len(piece)
            else:
                self._has_call = True


def count_reasoning_tokens(token_ids: list[int], closing: str, tokenizer: Tokenizer, ended_by: str = "") -> int:
    """How many tokens are reasoning, in a turn that began with it. The closing tag counts.

    `ended_by` is as in ReasoningParser.
    """
    lengths = range(len(token_ids) + 1)
    if ended_by:  # the most tokens that can be left out before it
        return max(
            bisect_left(
                lengths,
                True,
                key=lambda n: ended_by not in tokenizer.decode(token_ids[n:], skip_special_tokens=False),
            )
            - 1,
            0,
        )
    tag = tokenizer.token_to_id(closing)
    if tag in token_ids:
        return token_ids.index(tag) + 1
    # The tag is spelt out in several tokens: the fewest tokens whose text has it.
    return min(
        bisect_left(lengths, True, key=lambda n: closing in tokenizer.decode(token_ids[:n], skip_special_tokens=False)),
        len(token_ids),
    )
