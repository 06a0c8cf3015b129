"""The input of a custom tool, which a model writes as the one string in a function's arguments."""

from __future__ import annotations

import json
import re

from ..chat.tools.past_arguments import past_arguments
from .offered_tools import INPUT

_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Whole characters of a JSON string, or of what models take for one. The halves of a surrogate pair belong together.
_CHARACTERS = re.compile(
    r'(?:[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)

_LONGEST_ESCAPE = 12  # characters of a pair of surrogates


class CustomInput:
    """Decodes the input as its arguments arrive."""

    def __init__(self) -> None:
        self._held = ""
        self._arguments: list[str] = []
        self._is_open = False
        self._given: list[str] = []

    def feed(self, arguments: str) -> str:
        """More of the arguments; what is certain of the input with them."""
        self._arguments.append(arguments)
        self._held += arguments
        if not self._is_open:
            opening = _OPENING.match(self._held)
            if opening is None:
                return ""
            self._is_open, self._held = True, self._held[opening.end() :]
        characters = _CHARACTERS.match(self._held)
        assert characters is not None, "the pattern matches the empty string"
        self._held = self._held[characters.end() :]
        return self._give(json.loads(f'"{characters[0]}"', strict=False))

    def finish(self) -> str:
        """The rest, when no more arguments come. Arguments without such a string are the input as they are."""
        if self._is_open:
            is_whole = self._held.startswith('"') or len(self._held) < _LONGEST_ESCAPE
            return "" if is_whole else self._give(self._held)
        text = "".join(self._arguments)
        value = past_arguments(text).get(INPUT)
        return self._give(value if isinstance(value, str) else text)

    @property
    def text(self) -> str:
        """The input so far."""
        return "".join(self._given)

    def _give(self, text: str) -> str:
        self._given.append(text)
        return text


def as_arguments(text: str) -> str:
    """The arguments whose input is `text`."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
