"""How each format writes calls. Grammars of answers that may be calls are made from this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tidewheel.engine.constraints.json_schema import relocated
from tidewheel.engine.constraints.structural_tag import (
    Alternatives,
    Concatenation,
    ConstString,
    Format,
    JsonSchema,
    QwenXmlParameter,
    Tag,
    TagsWithSeparator,
)

from ...generation.structured_output import compact, json_schema_output
from ...generation.token_constraints import Calls
from ...protocol.chat import Tool
from .schema import arguments_schema

MAX_CALLS = 32
"""The most calls that a grammar lets an answer have: a weak model would not stop by itself."""


class CallFormat(NamedTuple):
    """One way to write calls: `opening`, calls with `separator` between them, `closing`.

    A call is `before`, its arguments, and `after`. NAME in `before` stands for the function's name. With a `key`, a
    JSON object takes the place of the arguments: it has the function's name, and the arguments under that key. An
    answer has no more than `at_most` calls.
    """

    before: str = ""
    after: str = ""
    separator: str = ""
    opening: str = ""
    closing: str = ""
    key: str | None = None
    content: type[JsonSchema | QwenXmlParameter] = JsonSchema
    at_most: int = MAX_CALLS


def calls_of(formats: Sequence[CallFormat], tools: Mapping[int, Tool], *, parallel: bool) -> Calls:
    """One or more calls, one only unless `parallel`, in one of `formats`. `tools` are by their place in the body."""
    arguments = [
        json_schema_output(arguments_schema(tool), f"tools[{i}].function.parameters") for i, tool in tools.items()
    ]
    ways = [_in_format(form, [*tools.values()], MAX_CALLS if parallel else 1) for form in formats]
    return Calls(Alternatives(ways) if ways else None, arguments)


def call_schema(name: str, parameters: dict[str, Any], key: str) -> dict[str, Any]:
    """The schema of a call as a JSON object of a function's name and, under `key`, its arguments."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: {"$ref": "#/$defs/arguments"}},
        "required": ["name", key],
        "additionalProperties": False,
        "$defs": {"arguments": relocated(parameters, "#/$defs/arguments")},
    }


def _in_format(form: CallFormat, tools: Sequence[Tool], most: int) -> Format:
    def call(tool: Tool) -> Tag:
        name, schema = tool.function.name, arguments_schema(tool)
        if form.key is not None:
            schema = call_schema(name, schema, form.key)
        # At a first brace that may begin an answer too, llguidance cannot tell which layout is meant.
        is_marked = form.opening or form.before
        return Tag(
            form.before.replace("NAME", name), form.content(compact(schema) if is_marked else schema), form.after
        )

    most = min(most, form.at_most)
    calls = TagsWithSeparator([call(tool) for tool in tools], form.separator, at_least_one=True, at_most=most)
    return Concatenation([ConstString(form.opening), calls, ConstString(form.closing)])
