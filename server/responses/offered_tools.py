"""The tools of a request as functions under one name each, and calls of these functions as the client knows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tidewheel.engine.errors import quoted

from ..chat.pieces import CallStart
from ..errors import bad_request
from ..protocol import chat
from ..protocol.chat import check_tool_count, check_tool_name
from ..protocol.decode import unsupported
from ..protocol.response_items import UNSET, CustomToolCall, FunctionCall
from ..protocol.response_tools import (
    AllowedTools,
    BuiltInTool,
    ClientTool,
    CustomTool,
    FunctionTool,
    GrammarInput,
    NamedCustomTool,
    NamedFunction,
    NamespaceTool,
    ResponseTool,
    ServerTool,
    ToolChoice,
    kind_of,
)
from .built_in_tools import function_of
from .lark_pattern import lark_pattern

INPUT = "input"
"""The one parameter of the function that stands for a custom tool."""

MAX_GRAMMARS = 2**14
"""Characters of all Lark grammars of a request. Reading this many takes some 20 ms."""


class OfferedTools:
    """The functions that stand for the tools that a client runs. Raises ApiError (400) for tools that cannot be served.

    `functions` are for the chat path, and `names` are the paths of what they were made from, for `renamed_fields`.
    """

    def __init__(self, tools: Sequence[ResponseTool]) -> None:
        self.functions: list[chat.Tool] = []
        self.names: dict[str, str] = {}
        self._tools: dict[str, tuple[str | None, ClientTool]] = {}  # with their namespaces, by the functions' names
        check_tool_count(sum(len(tool.tools) if isinstance(tool, NamespaceTool) else 1 for tool in tools), "tools")
        _check_grammars(tools)
        for namespace, tool, path in _client_tools(tools):
            tool.check_supported(path)
            check_tool_name(tool.name, f"{path}.name")
            name = flat_name(tool.name, namespace)
            check_tool_name(name, f"{path}.name")  # two names together may be too long
            if name in self._tools:
                raise bad_request(f"{path}.name: there is another tool {quoted(name)}", f"{path}.name")
            self.names[f"tools[{len(self.functions)}].function"] = path
            self._tools[name] = (namespace, tool)
            self.functions.append(chat.Tool("function", _function(name, tool, path)))

    def choice(self, choice: ToolChoice | None) -> chat.ToolChoice:
        """The chat path's `tool_choice`."""
        if choice is None or isinstance(choice, str):
            return choice
        if isinstance(choice, AllowedTools):
            allowed = [self._name(tool) for tool in choice.tools if not isinstance(tool, ServerTool)]
            if not allowed and choice.mode == "required":
                raise unsupported("tool_choice.tools", ": this server runs no tools; name tools of your own")
            names = [chat.AllowedTool(chat.FunctionName(name)) for name in allowed]
            return chat.AllowedToolChoice(chat.AllowedTools(choice.mode, names)) if names else "none"
        if isinstance(choice, ServerTool):
            raise unsupported("tool_choice.type", f": {quoted(kind_of(choice))}; this server runs no tools")
        return chat.NamedToolChoice(chat.FunctionName(self._name(choice)))

    def call(self, start: CallStart) -> FunctionCall | CustomToolCall:
        """The item of a call that begins."""
        namespace, tool = self._tools.get(start.name, (None, None))
        where = UNSET if namespace is None else namespace
        name = start.name if tool is None else tool.name
        if isinstance(tool, CustomTool):
            return CustomToolCall(call_id=start.id, name=name, input="", namespace=where)
        return FunctionCall(call_id=start.id, name=name, arguments="", namespace=where)

    def built_in(self, name: str) -> BuiltInTool | None:
        """The tool of OpenAI's that the function of that name stands for."""
        _, tool = self._tools.get(name, (None, None))
        return tool if isinstance(tool, BuiltInTool) else None

    def _name(self, named: NamedFunction | NamedCustomTool | BuiltInTool) -> str:
        wanted: type[ClientTool] = CustomTool if isinstance(named, NamedCustomTool) else FunctionTool
        within = None
        if isinstance(named, BuiltInTool):
            wanted = type(named)
        else:
            within = named.namespace
        for name, (namespace, tool) in self._tools.items():
            is_named = within in (None, namespace) and tool.name == named.name
            if isinstance(tool, wanted) and (is_named or name == named.name):
                return name
        raise bad_request(f"tool_choice names {quoted(named.name)}, which is not among the tools", "tool_choice")


def flat_name(name: str, namespace: str | None) -> str:
    """The name of the function that stands for a tool."""
    return f"{namespace}__{name}" if namespace else name


def _client_tools(tools: Sequence[ResponseTool]) -> Iterator[tuple[str | None, ClientTool, str]]:
    """All tools that the client runs, with their namespaces and paths."""
    for i, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            for k, inner in enumerate(tool.tools):
                yield tool.name, inner, f"tools[{i}].tools[{k}]"
        elif not isinstance(tool, ServerTool):
            yield None, tool, f"tools[{i}]"


def _check_grammars(tools: Sequence[ResponseTool]) -> None:
    size = 0
    for _, tool, path in _client_tools(tools):
        if isinstance(tool, CustomTool) and isinstance(tool.format, GrammarInput):
            size += len(tool.format.definition)
            if size > MAX_GRAMMARS:
                param = f"{path}.format.definition"
                raise bad_request(f"{param}: the grammars have more than {MAX_GRAMMARS} characters together", param)


def _function(name: str, tool: ClientTool, path: str) -> chat.ToolFunction:
    if isinstance(tool, FunctionTool):
        return chat.ToolFunction(name, tool.description, tool.parameters, tool.strict)
    if isinstance(tool, BuiltInTool):
        return function_of(tool)
    text: dict[str, Any] = {"type": "string"}
    description = tool.description or ""
    if isinstance(tool.format, GrammarInput):
        kind = "regular expression" if tool.format.syntax == "regex" else "Lark grammar"
        description += f"\n\nThe {INPUT} must match this {kind}:\n{tool.format.definition}"
        text["pattern"] = _pattern(tool.format, f"{path}.format.definition")
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return chat.ToolFunction(name, description.strip() or None, parameters)


def _pattern(form: GrammarInput, param: str) -> str:
    if form.syntax == "regex":
        return f"^(?:{form.definition})$"
    try:
        return f"^(?:{lark_pattern(form.definition)})$"
    except ValueError as error:
        raise bad_request(f"{param} cannot be served: {error}", param) from None
