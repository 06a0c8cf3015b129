"""What a tool's JSON schema says of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tidewheel.engine.constraints.json_schema import json_types

from ...protocol.chat import Tool

# What lets an object have properties although `properties` names none.
_ADMIT_PROPERTIES = frozenset(
    "$dynamicRef $ref additionalProperties allOf anyOf const dependencies dependentRequired dependentSchemas else enum "
    "if maxProperties minProperties not oneOf patternProperties propertyNames then unevaluatedProperties".split()
)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments: an object. It is an empty one if the function's schema names no properties.

    JSON Schema itself would let a model invent properties then.
    """
    schema: Mapping[str, Any] = tool.function.parameters or {}
    if not (schema.get("properties") or schema.get("required") or _ADMIT_PROPERTIES & schema.keys()):
        schema = {**schema, "additionalProperties": False}
    return {"type": "object", **schema}


def parameter_types(tools: Sequence[Tool], function: str, parameter: str) -> set[str]:
    """The JSON types that a parameter may have; empty if the schema does not say."""
    for tool in tools:
        if tool.function.name == function:
            root = tool.function.parameters or {}
            properties = root.get("properties")
            if isinstance(properties, dict) and parameter in properties:
                return json_types(properties[parameter], root)
    return set()
