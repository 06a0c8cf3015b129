"""Breaks text that comes in pieces into lines at words."""

from __future__ import annotations

import re

# Characters of scripts without spaces between words, which may be broken anywhere.
_UNSPACED = r"\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef"


class WordWrap:
    """Holds the last word back until it is whole. `width` is in characters; longer words are broken there."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._parts = re.compile(rf"\n|[^\S\n]+|[{_UNSPACED}]|[^\s{_UNSPACED}]{{1,{width}}}")
        self._column = 0
        self._held = ""

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
                self._column = 0
            elif not part.isspace() and self._column and self._column + len(part) > self._width:
                shown.append("\n")
                self._column = len(part)
            else:
                self._column += len(part)
            shown.append(part)
        return "".join(shown)
