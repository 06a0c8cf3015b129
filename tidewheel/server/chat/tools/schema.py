"""What a tool's JSON schema says of its parameters' types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidewheel.server.protocol.chat import Tool

_TYPE_NAMES = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null"
}  # fmt: skip
_MAX_DEPTH = 16  # references may go round in circles


def parameter_types(tools: Sequence[Tool], function: str, parameter: str) -> set[str]:
    """The JSON types that a parameter may have; empty if the schema does not say."""
    for tool in tools:
        if tool.function.name == function:
            root = tool.function.parameters or {}
            properties = root.get("properties")
            if isinstance(properties, dict) and parameter in properties:
                return _types(properties[parameter], root, _MAX_DEPTH)
    return set()


def _types(schema: Any, root: dict[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or not depth:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    if isinstance(schema.get("$ref"), str):
        return _types(_resolve(schema["$ref"], root), root, depth - 1)
    types = set[str]()
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(keyword), list):
            types.update(*(_types(option, root, depth - 1) for option in schema[keyword]))
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
