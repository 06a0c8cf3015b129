"""How each format writes calls. Grammars of answers that may be calls are made from this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tidewheel.engine.constraints.json_schema import relocated
from tidewheel.engine.constraints.structural_tag import (
    Alternatives,
    Concatenation,
    ConstString,
    Format,
    JsonSchema,
    Regex,
    Tag,
    TagsWithSeparator,
)

from ...errors import bad_request
from ...generation.structured_output import compact, json_schema_output
from ...generation.token_constraints import Calls
from ...protocol.chat import Tool
from .schema import arguments_schema

MAX_CALLS = 32
"""The most calls that a grammar lets an answer have: a weak model would not stop by itself."""
_NUMBER, _ID = "[0-9]{1,4}", "[a-z0-9]{10}"


class CallFormat(NamedTuple):
    """One way to write calls: `opening`, calls with `separator` between them, `closing`.

    A call is `before`, its arguments as `content` writes them, and `after`. NAME in `before` stands for the function's
    name. With a `key`, a JSON object takes the place of the arguments: it has the function's name under `name_key`, and
    the arguments under that key; before them, with an `id_key`, a number as text. With `before_id`, that and an id
    stand before it all. An answer has no more than `at_most` calls.
    """

    before: str = ""
    after: str = ""
    separator: str = ""
    opening: str = ""
    closing: str = ""
    key: str | None = None
    name_key: str = "name"
    id_key: str | None = None
    before_id: str = ""
    content: Callable[[dict[str, Any]], Format] = JsonSchema
    at_most: int = MAX_CALLS


def numbered(after_number: str, content: Callable[[dict[str, Any]], Format]) -> Callable[[dict[str, Any]], Format]:
    """Arguments with a number before them, such as a call's place in the conversation, and `after_number`."""
    return lambda schema: Concatenation([Regex(_NUMBER), ConstString(after_number), content(schema)])


def calls_of(formats: Sequence[CallFormat], tools: Mapping[int, Tool], *, parallel: bool) -> Calls:
    """One or more calls, one only unless `parallel`, in one of `formats`. `tools` are by their place in the body."""
    arguments = [
        json_schema_output(arguments_schema(tool), f"tools[{i}].function.parameters") for i, tool in tools.items()
    ]
    ways = [_in_format(form, tools, MAX_CALLS if parallel else 1) for form in formats]
    return Calls(Alternatives(ways), arguments)


def _call_schema(form: CallFormat, name: str, parameters: dict[str, Any], key: str) -> dict[str, Any]:
    """The schema of a call as a JSON object."""
    number = {} if form.id_key is None else {form.id_key: {"type": "string", "pattern": f"^{_NUMBER}$"}}
    properties = {**number, form.name_key: {"const": name}, key: {"$ref": "#/$defs/arguments"}}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
        "$defs": {"arguments": relocated(parameters, "#/$defs/arguments")},
    }


def _in_format(form: CallFormat, tools: Mapping[int, Tool], most: int) -> Format:
    def call(i: int, tool: Tool) -> Tag:
        name, schema = tool.function.name, arguments_schema(tool)
        if form.key is not None:
            schema = _call_schema(form, name, schema, form.key)
        # At a first brace that may begin an answer too, llguidance cannot tell which layout is meant.
        is_marked = form.opening or form.before_id or form.before
        try:
            content = form.content(compact(schema) if is_marked else schema)
        except ValueError as error:
            param = f"tools[{i}].function.parameters"
            raise bad_request(f"{param} cannot be compiled: {error}", param) from None
        before = form.before.replace("NAME", name)
        if form.before_id:
            return Tag(form.before_id, Concatenation([Regex(_ID), ConstString(before), content]), form.after)
        return Tag(before, content, form.after)

    most = min(most, form.at_most)
    every = [call(*placed) for placed in tools.items()]
    calls = TagsWithSeparator(every, form.separator, at_least_one=True, at_most=most)
    return Concatenation([ConstString(form.opening), calls, ConstString(form.closing)])
