"""RequestTools: which tools a request offers, and which calls it demands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

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


class RequestTools(msgspec.Struct, frozen=True):
    """A request's `tools`, `tool_choice` and `parallel_tool_calls`.

    `placed` are the tools that the model may call, by their places in the body. `demands_calls` says that the answer
    has to be one or more calls, of `named` if that is set. Without `parallel` it may have only one call.
    """

    placed: Mapping[int, Tool]
    demands_calls: bool
    named: Tool | None
    parallel: bool

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return list(self.placed.values())


def request_tools(body: ChatCompletionRequest) -> RequestTools:
    """Raises ApiError (400) for a `tool_choice` that does not fit the tools."""
    tools, choice = body.tools or [], body.tool_choice
    placed, named = dict(enumerate(tools)), None
    demands_calls = choice == "required"
    if isinstance(choice, CustomToolChoice):
        raise unsupported("tool_choice", " for custom tools; offer a function")
    if choice == "none":
        placed = {}
    elif choice not in (None, "auto") and not tools:
        raise bad_request("tool_choice needs tools to choose from", "tool_choice")
    elif isinstance(choice, NamedToolChoice):
        named, demands_calls = _tool(tools, choice.function.name), True
    elif isinstance(choice, AllowedToolChoice):
        demands_calls = choice.allowed_tools.mode == "required"
        known = {tool.function.name for tool in tools}
        allowed = {tool.function.name for tool in choice.allowed_tools.tools}
        for name in allowed - known:
            _tool(tools, name)
        placed = {i: tool for i, tool in placed.items() if tool.function.name in allowed}
    return RequestTools(placed, demands_calls, named, body.parallel_tool_calls is not False)


def demanded_calls_schema(tools: RequestTools) -> dict[str, Any] | None:
    """The JSON schema that an answer must follow where the request demands calls; None where it does not.

    For a named function it is the schema of its arguments. For `required` it is a list of objects with `name` and
    `parameters`: from one to MAX_CALLS of them, or exactly one without parallel calls. The schema does not cover the
    reasoning that may come first. `demanded_calls_parser` reads such an answer. Raises ApiError (400).
    """
    if not tools.demands_calls:
        return None
    if tools.named is not None:
        return arguments_schema(tools.named)
    offered = tools.offered
    for i, tool in enumerate(offered):
        check_depth(tool.function.parameters, f"tools[{i}].function.parameters")
    # Each tool's schema becomes a definition, and its references to itself are made to point there.
    definitions = {str(i): relocated(arguments_schema(tool), f"#/$defs/{i}") for i, tool in enumerate(offered)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": {"$ref": f"#/$defs/{i}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(offered)
    ]
    most = MAX_CALLS if tools.parallel else 1
    return {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}, "$defs": definitions}


def calls_in_format(tools: RequestTools, parser: type[ToolParser]) -> Calls:
    """The calls that the request demands, or else those that the model may make, in the format that `parser` reads."""
    placed = tools.placed
    if tools.named is not None:
        name = tools.named.function.name
        placed = {i: tool for i, tool in placed.items() if tool.function.name == name}
    return calls_of(parser.call_formats, placed, parallel=tools.parallel)


def demanded_calls_parser(tools: RequestTools, model: type[ToolParser] | None = None) -> ToolParser:
    """The parser for an answer that follows `demanded_calls_schema`. Its ids have the `model`'s own format."""
    new_id = model.new_id if model else None
    return CallListParser((), new_id) if tools.named is None else ArgumentsParser(tools.named.function.name, new_id)


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
