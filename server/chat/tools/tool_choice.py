"""`tool_choice`: which tools a request offers, and calls that it demands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tidewheel.engine.constraints.json_schema import relocated
from tidewheel.engine.errors import quoted

from ...errors import bad_request
from ...generation.structured_output import check_depth
from ...generation.token_constraints import Calls
from ...protocol.chat import (
    AllowedToolChoice,
    ChatCompletionRequest,
    CustomToolChoice,
    NamedToolChoice,
    Tool,
)
from ...protocol.decode import unsupported
from ..text_scanner import Steps
from .call_format import MAX_CALLS, calls_of
from .parser import ToolParser
from .schema import arguments_schema


def offered_tools(body: ChatCompletionRequest) -> Sequence[Tool]:
    """The tools that the model may call. Raises ApiError (400) for a `tool_choice` that does not fit the tools."""
    tools, choice = body.tools or [], body.tool_choice
    if choice is None or choice in ("auto", "none"):
        return [] if choice == "none" else tools
    if isinstance(choice, CustomToolChoice):
        raise unsupported("tool_choice", " for custom tools; offer a function")
    if not tools:
        raise bad_request("tool_choice needs tools to choose from", "tool_choice")
    if isinstance(choice, NamedToolChoice):
        _tool(tools, choice.function.name)
    elif isinstance(choice, AllowedToolChoice):
        known = {tool.function.name for tool in tools}
        allowed = {tool.function.name for tool in choice.allowed_tools.tools}
        for name in allowed - known:
            _tool(tools, name)
        return [tool for tool in tools if tool.function.name in allowed]
    return tools


def demanded_tool(body: ChatCompletionRequest) -> str | None:
    """The one function that the request names to be called."""
    return body.tool_choice.function.name if isinstance(body.tool_choice, NamedToolChoice) else None


def demands_calls(body: ChatCompletionRequest) -> bool:
    """Whether the answer has to be one or more tool calls."""
    choice = body.tool_choice
    if isinstance(choice, AllowedToolChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedToolChoice)


def demanded_calls_schema(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """The JSON schema that an answer must follow where the request demands calls; None where it does not.

    For a named function it is the schema of its arguments. For `required` it is a list of objects with `name` and
    `parameters`: from one to MAX_CALLS of them, or exactly one without parallel calls. The schema does not cover the
    reasoning that may come first. `demanded_calls_parser` reads such an answer. Raises ApiError (400).
    """
    tools = offered_tools(body)
    if not demands_calls(body):
        return None
    name = demanded_tool(body)
    if name is not None:
        return arguments_schema(_tool(tools, name))
    for i, tool in enumerate(tools):
        check_depth(tool.function.parameters, f"tools[{i}].function.parameters")
    # Each tool's schema becomes a definition, and its references to itself are made to point there.
    definitions = {str(i): relocated(arguments_schema(tool), f"#/$defs/{i}") for i, tool in enumerate(tools)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    most = 1 if body.parallel_tool_calls is False else MAX_CALLS
    return {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}, "$defs": definitions}


def optional_calls(body: ChatCompletionRequest, parser: type[ToolParser] | None) -> Calls | None:
    """The calls that the model may choose to make, in the format that `parser` reads; None if it has no choice."""
    if parser is None or not offered_tools(body) or demands_calls(body):
        return None
    return _calls(body, parser)


def demanded_calls(body: ChatCompletionRequest, parser: type[ToolParser]) -> Calls | None:
    """The calls that the request demands, in the format that `parser` reads; None where it demands none."""
    return _calls(body, parser, demanded_tool(body)) if demands_calls(body) else None


def _calls(body: ChatCompletionRequest, parser: type[ToolParser], name: str | None = None) -> Calls:
    """Calls of the tools on offer, or of the one with this `name`."""
    names = {tool.function.name for tool in offered_tools(body)} if name is None else {name}
    placed = {i: tool for i, tool in enumerate(body.tools or ()) if tool.function.name in names}
    return calls_of(parser.call_formats, placed, parallel=body.parallel_tool_calls is not False)


def demanded_calls_parser(body: ChatCompletionRequest, model: type[ToolParser] | None = None) -> ToolParser:
    """The parser for an answer that follows `demanded_calls_schema`. Its ids are those of the `model`'s own format."""
    name, new_id = demanded_tool(body), model.new_id if model else None
    return CallListParser((), new_id) if name is None else ArgumentsParser(name, new_id)


class ArgumentsParser(ToolParser):
    """An answer that is the arguments of one call."""

    def __init__(self, function: str, new_id: Callable[[], str] | None = None) -> None:
        super().__init__((), new_id)
        self._function = function

    def _parse(self) -> Steps[None]:
        yield from self._spaces()
        if (yield from self._peek()):
            self._start_call(self._function)
            yield from self._demanded_arguments()
        yield from self._drop_rest()


class CallListParser(ToolParser):
    """An answer that is a JSON list of calls. It contains no text for the user, even if it was cut off."""

    def _parse(self) -> Steps[None]:
        opening = "["
        while (yield from self._skip(opening, "{", '"name"', ":")):
            name = yield from self._json_string()
            if not name:
                break
            self._start_call(name)
            if not (yield from self._skip(",", '"parameters"', ":")):
                break
            self._settle()
            yield from self._demanded_arguments()
            if not (yield from self._skip("}")):
                break
            opening = ","
        yield from self._drop_rest()


def _tool(tools: Sequence[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise bad_request(f"tool_choice names {quoted(name)}, which is not among the tools", "tool_choice")
