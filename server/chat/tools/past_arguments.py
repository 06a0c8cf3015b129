"""Arguments of calls in earlier turns. Models break them, limits cut them, and clients send them back as they came."""

from __future__ import annotations

import re
from typing import Any

import orjson

from ..template_environment import ToolArguments
from .arguments import INVALID_JSON
from .values import to_json

_TOKEN = re.compile(r'\\.|[]["{},]', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}


_BROKEN = object()


def past_arguments(given: Any) -> ToolArguments:
    """The arguments as templates get them: always an object. `given` is text, or a JSON value.

    JSON that was cut off is completed, and its last member left out if that needs it. What says nothing (null, an empty
    list or string) is an empty object. Anything else is kept as text, under the key that answers have for it too.
    Raises RecursionError for a value that is nested too deeply to be written.
    """
    if not isinstance(given, str):
        return _repaired(given, "" if isinstance(given, dict) else to_json(given))
    text = given.strip() or "{}"
    value = _parsed(text)
    if isinstance(value, dict):
        return ToolArguments(value, text)
    if isinstance(value, str):  # encoded twice
        value = _parsed(value.strip() or "{}")
    return _repaired(_completed(text) if value is _BROKEN else value, text)


def _repaired(value: Any, text: str) -> ToolArguments:
    values = value if isinstance(value, dict) else {INVALID_JSON: text} if value else {}
    return ToolArguments(values, to_json(values))


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _BROKEN


def _completed(text: str) -> Any:
    """The value of JSON that was cut off; `_BROKEN` if it is broken otherwise."""
    opened: list[str] = []
    before = 0  # where what was cut off can be left out: behind a bracket, or before a comma
    in_string = False
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark == '"':
            in_string = not in_string
        elif in_string or mark.startswith("\\"):
            continue
        elif mark in _CLOSERS:
            opened.append(_CLOSERS[mark])
            before = token.end()
        elif mark == ",":
            before = token.start()
        elif not opened or opened.pop() != mark:
            return _BROKEN
        else:
            before = token.end()
    closers = "".join(reversed(opened))
    value = _parsed(text + '"' * in_string + closers)
    return _parsed(text[:before] + closers) if value is _BROKEN else value
