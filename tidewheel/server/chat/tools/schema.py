"""What a tool's JSON schema says of its parameters' types."""

from __future__ import annotations

from collections.abc import Sequence

from tidewheel.engine.constraints.json_schema import json_types
from tidewheel.server.protocol.chat import Tool


def parameter_types(tools: Sequence[Tool], function: str, parameter: str) -> set[str]:
    """The JSON types that a parameter may have; empty if the schema does not say."""
    for tool in tools:
        if tool.function.name == function:
            root = tool.function.parameters or {}
            properties = root.get("properties")
            if isinstance(properties, dict) and parameter in properties:
                return json_types(properties[parameter], root)
    return set()
