"""A parser for text that arrives in pieces, written as if it were all there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from .pieces import CallArguments, CallStart, Piece, Reasoning

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
"""A part of a parser: it yields where it has to wait for more text, and returns a T."""

_LONGEST_PART = 4096  # characters
_MAX_REREAD = 2**16  # characters
_JSON_SPACE = " \t\n\r"


class TextScanner(ABC):
    """Reads one choice's text through a cursor, and waits where the next step depends on text that is still to come.

    A subclass writes `_parse` as one pass over the text. It calls the methods below with `yield from` and looks ahead
    as far as it needs. Then it settles what it has read, or rejects it, which makes it plain text. Every decision waits
    for the text that it depends on. So the result is the same wherever the stream was cut into pieces.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._text = ""  # unsettled
        self._at = 0  # the cursor, in _text
        self._resume = 0  # where plain text goes on if what is being read is rejected
        self._ended = False
        self._cut_off = False
        self._named: str | None = None  # the function of the call that is being read, once that is certain
        self._steps = self._run()
        self._num_calls = 0
        self._num_reread = 0
        self._only_calls_since = False  # nothing but white space since the last call

    def feed(self, text: str) -> list[Piece]:
        """The pieces that `text` has made certain. Long texts are read in parts, so that many tags do not take long."""
        if len(text) <= _LONGEST_PART:
            self._text += text
            return self._advance()
        parts = range(0, len(text), _LONGEST_PART)
        return [piece for at in parts for piece in self.feed(text[at : at + _LONGEST_PART])]

    def finish(self, *, cut_off: bool = False) -> list[Piece]:
        """The pieces that were held back, when no more text comes. With `cut_off`, a begun call is not text."""
        self._ended, self._cut_off = True, cut_off
        return self._advance()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """The format. Text that is left when it returns is plain."""

    def _run(self) -> Steps[None]:
        yield from self._parse()
        self._settle(0)
        yield from self._text_until()

    def _advance(self) -> list[Piece]:
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    # Reading: these move the cursor and settle nothing.

    def _more(self) -> Steps[bool]:
        """Waits for more text; False if there will be none."""
        length = len(self._text)
        while len(self._text) == length:
            if self._ended:
                return False
            yield
        return True

    def _peek(self) -> Steps[str]:
        """The next character, empty at the end."""
        if self._at == len(self._text) and not (yield from self._more()):
            return ""
        return self._text[self._at]

    def _spaces(self) -> Steps[None]:
        """Skips JSON's white space."""
        while True:
            character = yield from self._peek()
            if not character or character not in _JSON_SPACE:
                return
            self._at += 1

    def _literal(self, expected: str) -> Steps[bool]:
        """Skips `expected` if it comes next, else nothing."""
        while not self._text.startswith(expected, self._at):
            rest = self._text[self._at :]
            if not expected.startswith(rest) or not (yield from self._more()):
                return False
        self._at += len(expected)
        return True

    def _read_until(self, tag: str) -> Steps[str | None]:
        """The text before `tag`, which is skipped too; None if it never comes."""
        start = searched = self._at
        while True:
            found = self._text.find(tag, searched)
            if found >= 0:
                self._at = found + len(tag)
                return self._text[start:found]
            searched = max(start, len(self._text) - len(tag) + 1)
            if not (yield from self._more()):
                return None

    # Deciding.

    def _settle(self, at: int | None = None) -> None:
        """Use up what was read; with `at`, only the part before that place."""
        self._text = self._text[self._at if at is None else at :]
        self._at = self._resume = 0
        self._named = None

    def _reject(self) -> None:
        """Turn what was read since the last `_settle` into plain text, up to where plain text continues.

        The exception is a tag that was the last thing before the text was cut off. What was read behind that place is
        read again, up to a total, so that many beginnings of calls do not take long. After that it is plain text too.
        """
        if self._cut_off and self._resume:
            self._settle(len(self._text))
        self._num_reread += max(0, self._at - self._resume)
        end = self._resume if self._num_reread <= _MAX_REREAD else max(self._at, self._resume)
        self._emit_text(self._text[:end])
        self._settle(end)

    def _text_until(self, *tags: str) -> Steps[str | None]:
        """Passes plain text on until one of `tags` has been read. Returns that tag, or None at the end.

        White space before the tag stays unsettled: it is dropped if the tag opens a call, and kept if the tag is
        rejected.
        """
        while True:
            found = [(place, tag) for tag in tags if (place := self._text.find(tag)) >= 0]
            if found:
                place, tag = min(found)
                before = len(self._text[:place].rstrip())
                self._emit_text(self._text[:before])
                self._settle(before)
                self._at = self._resume = place - before + len(tag)
                return tag
            certain = len(self._text) - self._held_back(tags)
            self._emit_text(self._text[:certain])
            self._settle(certain)
            if not (yield from self._more()):
                if not (self._only_calls_since and self._text.isspace()):
                    self._emit_text(self._text)
                self._settle(len(self._text))
                return None

    def _held_back(self, tags: tuple[str, ...]) -> int:
        """How much of the end of the text may turn out to be white space and one of `tags`."""
        if not tags and not self._only_calls_since:
            return 0
        text, held = self._text, self._begun_tag(tags)
        return len(text) - len(text[: len(text) - held].rstrip())

    def _begun_tag(self, tags: tuple[str, ...]) -> int:
        """How much of the end of the text may turn out to be one of `tags`."""
        text, held = self._text, 0
        for tag in tags:
            for length in range(min(len(tag) - 1, len(text)), held, -1):
                if text.endswith(tag[:length]):
                    held = length
                    break
        return held

    def _drop_rest(self) -> Steps[None]:
        """Leaves out all that comes."""
        more = True
        while more:
            self._settle(len(self._text))
            more = yield from self._more()

    # Giving.

    def _emit_text(self, text: str) -> None:
        if not text or (self._cut_off and self._only_calls_since):  # the beginning of what closes a call
            return
        self._only_calls_since = False
        if self._pieces and isinstance(last := self._pieces[-1], str):
            self._pieces[-1] = last + text
        else:
            self._pieces.append(text)

    def _emit_reasoning(self, text: str) -> None:
        if not text:
            return
        if self._pieces and isinstance(last := self._pieces[-1], Reasoning):
            text = last.text + text
            self._pieces.pop()
        self._pieces.append(Reasoning(text))

    def _open_call(self, call_id: str, name: str) -> None:
        """Opens the next call, and settles what was read so far."""
        self._settle()
        self._only_calls_since = True
        self._pieces.append(CallStart(self._num_calls, call_id, name))
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        """More arguments of the call that was opened last."""
        if not text:
            return
        index = self._num_calls - 1
        if self._pieces and isinstance(last := self._pieces[-1], CallArguments):
            text = last.text + text
            self._pieces.pop()
        self._pieces.append(CallArguments(index, text))
