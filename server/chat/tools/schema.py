"""What a tool's JSON schema says of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tidewheel.engine.constraints.depth import resolve
from tidewheel.engine.constraints.json_schema import json_types

from ...protocol.chat import Tool

# What lets an object have properties although `properties` names none.
_ADMIT_PROPERTIES = frozenset(
    "$dynamicRef $ref additionalProperties allOf anyOf const dependencies dependentRequired dependentSchemas else enum "
    "if maxProperties minProperties not oneOf patternProperties propertyNames then unevaluatedProperties".split()
)

_MAX_STEPS = 64  # through references and alternatives


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments: an object. It is an empty one if the function's schema names no properties.

    JSON Schema itself would let a model invent properties then.
    """
    schema: Mapping[str, Any] = tool.function.parameters or {}
    if not (schema.get("properties") or schema.get("required") or _ADMIT_PROPERTIES & schema.keys()):
        schema = {**schema, "additionalProperties": False}
    return {"type": "object", **schema}


class Part(NamedTuple):
    """A part of a schema, whose `root` has its definitions."""

    schema: Any
    root: dict[str, Any]

    def types(self) -> set[str]:
        """The JSON types that it allows; empty if it does not say."""
        return json_types(self.schema, self.root)

    def member(self, key: str) -> Part:
        """What it says of an object's member."""
        properties = self._of("properties")
        return Part(properties.get(key, {}) if isinstance(properties, dict) else {}, self.root)

    def element(self) -> Part:
        """What it says of a list's elements."""
        return Part(self._of("items"), self.root)

    def _of(self, keyword: str) -> Any:
        """A keyword's value, here or in the first alternative that has it."""
        waiting = [self.schema]
        for _ in range(_MAX_STEPS):
            if not waiting or not isinstance(part := waiting.pop(), dict):
                continue
            if keyword in part:
                return part[keyword]
            if isinstance(part.get("$ref"), str):
                waiting.append(resolve(part["$ref"], self.root))
            for alternatives in ("anyOf", "oneOf", "allOf"):
                options = part.get(alternatives)
                waiting += reversed(options) if isinstance(options, list) else ()
        return {}


def parameters_of(tools: Sequence[Tool], function: str) -> Part:
    """The schema of a function's arguments; an empty one if no such function is there."""
    root = next((tool.function.parameters for tool in tools if tool.function.name == function), None) or {}
    return Part(root, root)


def parameter_types(tools: Sequence[Tool], function: str, parameter: str) -> set[str]:
    """The JSON types that a parameter may have; empty if the schema does not say."""
    return parameters_of(tools, function).member(parameter).types()
