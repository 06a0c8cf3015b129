"""JSON schemas: their parts, the types that they allow, and the place of an error in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .depth import DEFINITIONS, TEXT_KEYS, resolve

_MAX_TRIALS = 200
_ONE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_TYPE_NAMES = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null"
}  # fmt: skip
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")


def failing_part(schema: dict[str, Any], error_of: Callable[[dict[str, Any]], str]) -> str:
    """A JSON pointer to the smallest part of `schema` that alone has the error of the whole; empty for the whole.

    llguidance's messages do not say where an error is. `error_of` compiles a schema and returns its error. It is called
    a limited number of times.
    """
    message, pointer, trials = error_of(schema), "", 0
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    part = schema
    while True:
        for path, child in _parts(part):
            trials += 1
            if trials > _MAX_TRIALS:
                return pointer
            if error_of({**definitions, **child}) == message:
                pointer, part = pointer + path, child
                break
        else:
            return pointer


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    # Definitions first: what refers to a broken one fails alike, and is not the place.
    for keyword, value in sorted(schema.items(), key=lambda item: item[0] not in DEFINITIONS):
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


def json_types(schema: Any, root: dict[str, Any]) -> set[str]:
    """The JSON types that `schema`, a part of `root`, allows; empty if it does not say. Follows references."""
    types = set[str]()
    waiting, seen = [schema], set[int]()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        declared = part.get("type")
        if isinstance(declared, str):
            types.add(declared)
        elif isinstance(declared, list):
            types.update(name for name in declared if isinstance(name, str))
        elif isinstance(part.get("$ref"), str):
            waiting.append(resolve(part["$ref"], root))
        else:
            waiting += [option for keyword in _ALTERNATIVES for option in _listed(part.get(keyword))]
            values = [part["const"]] if "const" in part else _listed(part.get("enum"))
            types.update(_TYPE_NAMES[type(value)] for value in values)
            if "properties" in part:
                types.add("object")
    return types


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def relocated(schema: Any, root: str) -> Any:
    """`schema` with its references to itself changed to point to `root`, its own place, such as `#/$defs/a`.

    It recurses for each level, so the nesting of the schema must have been checked.
    """
    if isinstance(schema, list):
        return [relocated(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value.removeprefix("#")
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if key in TEXT_KEYS
        else relocated(value, root)
        for key, value in schema.items()
    }


def part_of(schema: dict[str, Any], *path: str) -> dict[str, Any]:
    """A part of a schema, with all definitions that the part may refer to."""
    pointer = "".join(f"/{_escaped(key)}" for key in path)
    return {"$ref": f"#/$defs/whole{pointer}", "$defs": {"whole": relocated(schema, "#/$defs/whole")}}
