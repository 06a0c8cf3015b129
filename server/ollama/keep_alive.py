"""Ollama's `keep_alive`: how long a model stays loaded after a request."""

from __future__ import annotations

import re

from ..errors import ApiError, bad_request

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_LONGEST = 64  # characters


def keep_alive_s(given: object) -> float | None:
    """Seconds; negative ones are for ever. `given` is a number of them, or text such as "5m" or "1h30m".

    None is None. Raises ApiError (400) for anything else.
    """
    if given is None:
        return None
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given)
    if isinstance(given, str) and len(given) <= _LONGEST:
        sign, text = (-1.0, given[1:]) if given.startswith("-") else (1.0, given.removeprefix("+"))
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return sign * float(text)
        if text and re.fullmatch(f"(?:{_PART.pattern})+", text):
            return sign * sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
    raise _refused()


def _refused() -> ApiError:
    return bad_request('keep_alive must be seconds, or text such as "5m" or "1h30m"; -1 is for ever', "keep_alive")
