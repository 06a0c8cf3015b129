"""Texts of a command line or an environment to values: each raises ValueError with words for the user."""

from __future__ import annotations

import json
import re
from typing import Any

_DTYPES = {"half": "float16", "float": "float32"}
_KV_CACHE_DTYPES = {**_DTYPES, "fp8": "fp8_e5m2"}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


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
    """A `count` of at least 1."""
    value = count(text)
    if value < 1:
        raise ValueError(f"must be at least 1, got {text!r}")
    return value


def positive_number(text: str) -> float:
    """A number above 0. Raises ValueError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(f"must be above 0, got {text!r}")
    return value


def gibibytes(text: str) -> float | None:
    """An amount of memory; 0 leaves it to the server. Raises ValueError."""
    return not_negative_number(text) or None


def not_negative_number(text: str) -> float:
    """A number of at least 0. Raises ValueError."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(f"must be at least 0, got {text!r}")
    return value


def time_limit(text: str) -> float | None:
    """Seconds; 0 is no limit. Raises ValueError."""
    return not_negative_number(text) or None


def port_number(text: str) -> int:
    """A TCP port; 0 lets the system choose. Raises ValueError."""
    value = int(text)
    if not 0 <= value <= 65535:
        raise ValueError(f"must be between 0 and 65535, got {text!r}")
    return value


def dtype_name(text: str) -> str:
    """A dtype under its full name."""
    return _DTYPES.get(text, text)


def kv_cache_dtype_name(text: str) -> str:
    """A KV cache's dtype under its full name."""
    return _KV_CACHE_DTYPES.get(text, text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {text!r}")
    return value


def switch(text: str) -> bool:
    """An environment variable's 1 or 0. Raises ValueError."""
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return known[text.strip().lower()]
    except KeyError:
        raise ValueError(f"must be 1 or 0, got {text!r}") from None


def api_key(text: str) -> str:
    """A key as it may be sent in a header. Raises ValueError."""
    if not text or not text.isprintable() or any(character.isspace() for character in text):
        raise ValueError("a key must have at least one character, and no spaces")
    return text


def metrics_prefix(text: str) -> str:
    """What may begin the name of a metric. Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z_:][A-Za-z0-9_:]*", text):
        raise ValueError(f"must have letters, digits, underscores and colons only, like vllm:, got {text!r}")
    return text


def strings(text: str) -> list[str]:
    """One string, or the strings of a JSON list, as vLLM's CORS options are given. Raises ValueError."""
    if not text.startswith("["):
        return [text]
    items = json.loads(text)
    if not all(isinstance(item, str) for item in items):
        raise ValueError(f"must be a list of strings, got {text}")
    return list(items)


def url_prefix(text: str) -> str:
    """A path such as /api, without a slash at its end. Raises ValueError."""
    if not text.startswith("/"):
        raise ValueError(f"must begin with a slash, like /api, got {text!r}")
    return text.rstrip("/")


def certificate_requirement(text: str) -> str:
    """none, optional or required, which Python's numbers for them mean too."""
    return {"0": "none", "1": "optional", "2": "required"}.get(text, text)
