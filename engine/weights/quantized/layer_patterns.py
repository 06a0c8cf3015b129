"""Regular expressions of layers' names, from configs that are not trusted.

Python's matching tries alternatives one after the other. With a repeated group it may need longer than the machine
lives: `(a+)+$` doubles its steps with each character of a name. So the number of tries is bounded before anything is
matched: no group may be repeated, and the ways that are left are counted. The time that a config's patterns take is
bounded too, because there may be many layers.
"""

from __future__ import annotations

import math
import re
import time

from ...errors import ModelError
from ...files.wording import shown

_MAX_CHARACTERS = 512
_MAX_BITS = 30.0  # of ways to match one name: seconds at most
_REPEAT_BITS = 5.0  # names have parts of about 32 characters
_MAX_SECONDS = 10.0
_CLASS = r"\[\^?\]?(?:\\.|[^\]\\])*\]"
_GROUP = r"\((?:\?[:=!]|\?<[=!]|\?P<\w+>)?"
_TOKEN = re.compile(rf"\\.|{_CLASS}|\(\?i\)|{_GROUP}|.", re.DOTALL)


class LayerPattern:
    """A pattern that is matched from the beginning of a layer's name.

    Raises ModelError, which begins with `owner`, for what is no regular expression, or could take too long.
    """

    def __init__(self, pattern: str, owner: str) -> None:
        self._owner, self._text, self._seconds = owner, pattern, 0.0
        try:
            self._compiled = re.compile(pattern[: _MAX_CHARACTERS + 1])
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(f"{owner}: {shown(pattern)} is not a regular expression: {error}") from None
        if len(pattern) > _MAX_CHARACTERS:
            raise self._too_long(f"has {len(pattern)} characters, more than the {_MAX_CHARACTERS} there may be")
        if reason := _why_slow(pattern):
            raise self._too_long(reason)

    def matches(self, layer: str) -> bool:
        """Whether the layer's name begins as the pattern says."""
        started = time.process_time()
        found = self._compiled.match(layer) is not None
        self._seconds += time.process_time() - started
        if self._seconds > _MAX_SECONDS:
            raise self._too_long(f"takes more than {_MAX_SECONDS:g} s of matching")
        return found

    def _too_long(self, reason: str) -> ModelError:
        return ModelError(f"{self._owner}: {shown(self._text)} {reason}; name the layers in a simpler way")


def _why_slow(pattern: str) -> str | None:
    """In words, why matching could take too long; None if it cannot."""
    bits, alternatives, before = 0.0, [1], ""
    for token in _TOKEN.findall(pattern):
        if token == "(?i)":
            continue
        if before == "(" and token == "?":  # comments and flags, which could hide what is repeated
            return "has a group that is not (...), (?:...), (?P<name>...), (?=...), (?!...), (?<=...) or (?<!...)"
        if token[0] == "(":
            alternatives.append(1)
        elif token == "|":
            alternatives[-1] += 1
        elif token == ")":
            bits += math.log2(alternatives.pop())
        elif token in ("*", "+", "{"):
            if before == ")":
                return "repeats a group, which can take forever"
            bits += _REPEAT_BITS
        elif token == "?" and before not in ("*", "+", "}", "?"):
            bits += 1
        before = token
    bits += math.log2(alternatives[0])
    return f"can match in too many ways (2^{bits:.0f})" if bits > _MAX_BITS else None
