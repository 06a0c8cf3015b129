"""Patterns for names of modules, as peft's configs have them. They come from a file, so their cost is bounded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from ..errors import ModelError
from ..files.wording import shown

if hasattr(re, "_parser"):
    from re import _parser as _sre  # type: ignore[attr-defined]
else:  # Python 3.10
    import sre_parse as _sre

_MAX_CHARACTERS = 256
_MAX_PATTERNS = 4096
_MAX_REPEATS = 3  # a name of 100 characters is matched in a millisecond then

ValueT = TypeVar("ValueT")


class NamePatterns(dict[str, "re.Pattern[str] | None"]):
    """Compiled patterns by their text; None for one that is a plain name."""


def compile_patterns(values: Mapping[str, Any], where: str) -> NamePatterns:
    """The keys of `values` as patterns. Raises ModelError, naming `where`, for one that could take long to match."""
    if len(values) > _MAX_PATTERNS:
        raise ModelError(f"{where} has {len(values)} entries; there may be at most {_MAX_PATTERNS}")
    return NamePatterns({text: _compiled(text, where) for text in values})


def value_for(name: str, patterns: NamePatterns, values: Mapping[str, ValueT], default: ValueT) -> ValueT:
    """The value of the first pattern that a module's whole name matches, or what is behind one of its dots."""
    for text, pattern in patterns.items():
        if name == text or name.endswith("." + text) or (pattern is not None and pattern.fullmatch(name)):
            return values[text]
    return default


def _compiled(text: str, where: str) -> re.Pattern[str] | None:
    if re.fullmatch(r"[\w.]*", text):
        return None
    if len(text) > _MAX_CHARACTERS:
        raise ModelError(f"{where}: the pattern {shown(text)} is longer than {_MAX_CHARACTERS} characters")
    try:
        repeats = _count_repeats(_sre.parse(text), where, text)
        pattern = re.compile(rf"(?:.*\.)?(?:{text})")
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(f"{where}: {shown(text)} is not a regular expression: {error}") from None
    if repeats > _MAX_REPEATS:
        raise ModelError(f"{where}: the pattern {shown(text)} has more than {_MAX_REPEATS} repeats; write it shorter")
    return pattern


def _count_repeats(parsed: Any, where: str, text: str, inside: bool = False) -> int:
    """How many repeats there are. Raises ModelError for one inside another, and for references to groups."""
    count = 0
    for operation, argument in parsed:
        kind = str(operation)
        repeats = kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
        if (repeats and inside) or kind.startswith(("GROUPREF", "ASSERT")):
            raise ModelError(f"{where}: the pattern {shown(text)} could take long to match; write it without {kind}")
        count += repeats
        for part in _parts(argument):
            count += _count_repeats(part, where, text, inside or repeats)
    return count


def _parts(argument: Any) -> list[Any]:
    if isinstance(argument, _sre.SubPattern):
        return [argument]
    if isinstance(argument, tuple | list):
        return [part for item in argument for part in _parts(item)]
    return []
