"""Where in a JSON schema it is that cannot be compiled: llguidance's messages do not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_MOST_TRIALS = 200
_ONE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")


def failing_part(schema: dict[str, Any], error_of: Callable[[dict[str, Any]], str]) -> str:
    """A JSON pointer to the smallest part of `schema` that fails alone as the whole does; empty for the whole.

    `error_of` compiles a schema and says what is wrong with it. It is called a limited number of times.
    """
    message, pointer, trials = error_of(schema), "", 0
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    part = schema
    while True:
        for path, child in _parts(part):
            trials += 1
            if trials > _MOST_TRIALS:
                return pointer
            if error_of({**definitions, **child}) == message:
                pointer, part = pointer + path, child
                break
        else:
            return pointer


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    # Definitions first: what refers to a broken one fails alike, and is not the place.
    for keyword, value in sorted(schema.items(), key=lambda item: item[0] not in _DEFINITIONS):
        if keyword in _ONE:
            parts = [(f"/{keyword}", value)]
        elif keyword in _MANY and isinstance(value, list):
            parts = [(f"/{keyword}/{i}", part) for i, part in enumerate(value)]
        elif keyword in _NAMED and isinstance(value, dict):
            parts = [(f"/{keyword}/{_escaped(name)}", part) for name, part in value.items()]
        else:
            continue
        yield from ((path, part) for path, part in parts if isinstance(part, dict))


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
