"""Breaks text that comes in pieces into lines at words."""

from __future__ import annotations

import re
from unicodedata import east_asian_width

# Characters of scripts without spaces between words, which may be broken anywhere.
_UNSPACED = r"\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef"


class WordWrap:
    """Holds the last word back until it is whole. `width` is in columns; longer words are broken there.

    Spaces are held back too: at the end of a full line, a terminal would begin another one for them.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._parts = re.compile(rf"\n|[^\S\n]+|[{_UNSPACED}]|[^\s{_UNSPACED}]{{1,{width}}}")
        self._column = 0
        self._held = ""
        self._spaces = ""

    def feed(self, text: str) -> str:
        """What can be shown once `text` has come."""
        parts = self._parts.findall(self._held + text)
        whole = not parts or parts[-1].isspace() or "\u2e80" <= parts[-1] <= "\uffef" or len(parts[-1]) == self._width
        self._held = "" if whole else parts.pop()
        return self._wrap(parts)

    def end(self) -> str:
        """What was held back."""
        parts, self._held = self._parts.findall(self._held), ""
        return self._wrap(parts)

    def _wrap(self, parts: list[str]) -> str:
        shown = []
        for part in parts:
            if part == "\n":
                self._column, self._spaces = 0, ""
                shown.append(part)
            elif part.isspace():
                self._spaces += part
            else:
                shown.append(self._placed(part))
        return "".join(shown)

    def _placed(self, word: str) -> str:
        """A word with what comes before it: spaces, or a line break in their place."""
        spaces, self._spaces = self._spaces, ""
        columns = sum(2 if east_asian_width(character) in "WF" else 1 for character in word)
        if self._column and self._column + len(spaces) + columns > self._width:
            self._column = columns
            return f"\n{word}"
        if not self._column:  # an indentation, which must leave room for the word
            spaces = spaces[: max(self._width - columns, 0)]
        self._column += len(spaces) + columns
        return spaces + word
