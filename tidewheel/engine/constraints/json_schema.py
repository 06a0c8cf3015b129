"""JSON schemas: their parts, what types they allow, and where it is in one that cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_MOST_TRIALS = 200
_ONE = ("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")
_TYPE_NAMES = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null"
}  # fmt: skip
_MAX_DEPTH = 16  # references may go round in circles


def failing_part(schema: dict[str, Any], error_of: Callable[[dict[str, Any]], str]) -> str:
    """A JSON pointer to the smallest part of `schema` that fails alone as the whole does; empty for the whole.

    llguidance's messages do not say. `error_of` compiles a schema and says what is wrong with it. It is called a
    limited number of times.
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


def json_types(schema: Any, root: dict[str, Any], depth: int = _MAX_DEPTH) -> set[str]:
    """The JSON types that `schema`, a part of `root`, allows; empty if it does not say. Follows references so deep."""
    if not isinstance(schema, dict) or not depth:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    if isinstance(schema.get("$ref"), str):
        return json_types(_resolve(schema["$ref"], root), root, depth - 1)
    types = set[str]()
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(keyword), list):
            types.update(*(json_types(option, root, depth - 1) for option in schema[keyword]))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        types.update(_TYPE_NAMES[type(value)] for value in values)
    if "properties" in schema:
        types.add("object")
    return types


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    target: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(target, dict):
            return None
        target = target.get(part.replace("~1", "/").replace("~0", "~"))
    return target


def relocated(schema: Any, root: str) -> Any:
    """`schema` with its references to itself pointing to where `root` says it lies: a reference like `#/$defs/a`."""
    if isinstance(schema, list):
        return [relocated(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value.removeprefix("#")
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if key in ("const", "enum", "default", "examples")
        else relocated(value, root)
        for key, value in schema.items()
    }


def part_of(schema: dict[str, Any], *path: str) -> dict[str, Any]:
    """A schema that is a part of another, with all that the part may refer to."""
    pointer = "".join(f"/{_escaped(key)}" for key in path)
    return {"$ref": f"#/$defs/whole{pointer}", "$defs": {"whole": relocated(schema, "#/$defs/whole")}}
