"""The spellings that vLLM's command line allows: `--max_model_len`, and `--hf-overrides.rope_theta 1e6` for JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

_FLAG = re.compile(r"--?[A-Za-z]")
_WORDS = {"true": True, "false": False, "none": None}


def is_flag(argument: str) -> bool:
    """Whether it looks like a flag: a negative number does not."""
    return _FLAG.match(argument) is not None


def spelled(arguments: Sequence[str]) -> list[str]:
    """The same line with hyphens in its flags, and with the dotted keys of each flag as one JSON object.

    `--flag.a.b 1 --flag.c+ 2,3` is `--flag={"a": {"b": 1}, "c": [2, 3]}`. A key without a value is true. Keys are
    added to a JSON object that the same line gives for the flag. What has been spelled stays as it is.
    """
    line: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = list(reversed(arguments))
    while rest:
        name, equals, value = rest.pop().partition("=")
        if not name.startswith("--"):
            line.append(name + equals + value)
            continue
        flag, dot, path = name.partition(".")
        flag = flag.replace("_", "-")
        if not dot:
            line.append(flag + equals + value)
            continue
        if not equals:
            value = rest.pop() if rest and not is_flag(rest[-1]) else "true"
        _put(objects.setdefault(flag, {}), path.split("."), _value(value))
        line[:0] = take_positionals(rest)
    for flag, keys in objects.items():
        line = [*_joined(line, flag, keys)]
    return line


def take_positionals(rest: list[str]) -> list[str]:
    """The arguments up to the next flag, off the end of `rest`, which is in reverse.

    They belong to no flag, so they go to the front of the line when the flag before them is taken out of it: else they
    would become values of the flag before that one.
    """
    taken = []
    while rest and not is_flag(rest[-1]):
        taken.append(rest.pop())
    return taken


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return _WORDS.get(text.lower(), text)


def _put(target: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        inner = target.get(key)
        target[key] = target = inner if isinstance(inner, dict) else {}
    name = path[-1].removesuffix("+")
    if name == path[-1]:
        target[name] = value
    else:
        before = target.get(name)
        items = [_value(item) for item in value.split(",")] if isinstance(value, str) else [value]
        target[name] = [*(before if isinstance(before, list) else ()), *items]


def _joined(line: Sequence[str], flag: str, keys: dict[str, Any]) -> Iterator[str]:
    """The line with the flag's object last, which has the keys of those that the line gave."""
    given: dict[str, Any] = {}
    rest = list(reversed(line))
    while rest:
        name, equals, text = rest.pop().partition("=")
        if name != flag:
            yield name + equals + text
            continue
        value = _value(text if equals else rest.pop() if rest else "")
        if isinstance(value, dict):
            given |= value
    yield f"{flag}={json.dumps({**given, **keys})}"
