"""Values of options: texts to values, which raise ValueError with words for the user, and what values must be.

What a value must be is a function that returns None for a value that is so, else the words "must be ...".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_INFINITY = float("inf")
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

Check = Callable[[float], "str | None"]


def count(text: str) -> int:
    """A number such as 4096, 4k (4,000), 4K (4,096), 1.5k or 1m. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number such as 4096, 4k or 4K")
    value = float(match[1]) * _COUNT_UNITS[match[2]]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def positive_count(text: str) -> int:
    """A `count` of at least 1, for what is no declared option."""
    value = count(text)
    if reason := at_least(1)(value):
        raise ValueError(f"{reason}, got {text!r}")
    return value


def whole_number(text: str) -> int:
    """A whole number of either sign. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"must be a whole number, got {text!r}") from None


def number(text: str) -> float:
    """A number such as 0.5. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number, got {text!r}") from None


def switch(text: str) -> bool:
    """1 or 0, or a word for one of them, as an environment variable has it. Raises ValueError."""
    try:
        return _SWITCH[text.strip().lower()]
    except KeyError:
        raise ValueError(f"must be 1 or 0, got {text!r}") from None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {text!r}")
    return value


def number_or_none(text: str) -> float | None:
    """A number; 0 is None, which means no limit, or leaves the choice to the server. Raises ValueError."""
    return number(text) or None


def at_least(least: int) -> Check:
    """Not less than `least`, and finite."""
    return lambda value: None if least <= value < _INFINITY else f"must be at least {least}"


def above(bound: int) -> Check:
    """More than `bound`, and finite."""
    return lambda value: None if bound < value < _INFINITY else f"must be above {bound}"


def between(least: int, most: int) -> Check:
    """Within these bounds, both included."""
    return lambda value: None if least <= value <= most else f"must be between {least} and {most}"
