"""Finds the names that a wrong one may have meant, in time that no name can make long."""

from __future__ import annotations

from collections.abc import Iterable

_MOST_CHARACTERS = 100  # of a name that are looked at
_NEAR = 0.4  # this part of two names' pairs of characters is alike


def near_names(wrong: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Up to `most` of the names, the nearest first. Case and punctuation do not count: gpt4 is near GPT-4."""
    asked = _pairs(wrong)

    def likeness(name: str) -> float:
        pairs = _pairs(name)
        return 2 * len(asked & pairs) / ((len(asked) + len(pairs)) or 1)

    ranked = sorted(((likeness(name), name) for name in names), key=lambda one: (-one[0], one[1]))
    return [name for value, name in ranked[:most] if value >= _NEAR]


def _pairs(name: str) -> set[str]:
    """Each two characters that follow each other, with the first one alone."""
    text = "".join(filter(str.isalnum, name[:_MOST_CHARACTERS].lower()))
    return {text[:1], *(text[place : place + 2] for place in range(len(text) - 1))}
