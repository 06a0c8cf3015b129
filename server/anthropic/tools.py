"""Tools of `/v1/messages` as functions. Clients send only the names of Anthropic's own tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from tidewheel.engine.errors import quoted

from ..errors import bad_request
from ..protocol import chat
from ..protocol.decode import unsupported
from ..protocol.messages import ToolDefinition, runs_on_server

_PATH = {"type": "string", "description": "The absolute path of a file or folder"}
_RANGE = {"type": "array", "items": {"type": "integer"}, "description": "With view: the first and last line, or -1"}
_EDITS: dict[str, Any] = {
    "file_text": {"type": "string", "description": "With create: the content of the file"},
    "old_str": {"type": "string", "description": "With str_replace: the text to replace, which is there once"},
    "new_str": {"type": "string", "description": "With str_replace: the text in its place"},
    "insert_line": {"type": "integer", "description": "With insert: the line after which to insert"},
    "insert_text": {"type": "string", "description": "With insert: the text to insert"},
}


def _commands(names: str, properties: dict[str, Any]) -> dict[str, Any]:
    command = {"type": "string", "enum": names.split()}
    return {"type": "object", "properties": {"command": command, **properties}, "required": ["command"]}


# By the beginning of their types, which end in a date.
_KNOWN = {
    "bash_": (
        "Runs a command in a bash session that stays open",
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command"},
                "restart": {"type": "boolean", "description": "Start a new session instead"},
            },
        },
    ),
    "memory_": (
        "Reads and writes files of a memory that outlasts the conversation, in the folder /memories",
        _commands(
            "view create str_replace insert delete rename",
            {
                "path": _PATH,
                "view_range": _RANGE,
                **_EDITS,
                "old_path": {"type": "string", "description": "With rename: the path"},
                "new_path": {"type": "string", "description": "With rename: the path in its place"},
            },
        ),
    ),
    "text_editor_": (
        "Views and edits files",
        _commands("view create str_replace insert", {"path": _PATH, "view_range": _RANGE, **_EDITS}),
    ),
}
# These insert `new_str`, and can take an edit back.
_OLD_EDITORS = ("text_editor_20241022", "text_editor_20250124")
_OLD_EDITOR = _commands(
    "view create str_replace insert undo_edit",
    {"path": _PATH, "view_range": _RANGE, **{name: _EDITS[name] for name in _EDITS if name != "insert_text"}},
)


def chat_tools(tools: Sequence[ToolDefinition]) -> tuple[list[chat.Tool], dict[str, str]]:
    """The functions, and the paths of what they were made from. Raises ApiError (400) for tools that are not valid."""
    functions: list[chat.Tool] = []
    names: dict[str, str] = {}
    for i, tool in enumerate(tools):
        if runs_on_server(tool.type):
            continue
        path = f"tools[{i}]"
        if tool.name is None:
            raise bad_request(f"{path}.name is required", f"{path}.name", "missing_required_parameter")
        description, schema = _description_and_schema(tool, path)
        names[f"tools[{len(functions)}].function"] = path
        names[f"tools[{len(functions)}].function.parameters"] = f"{path}.input_schema"
        functions.append(chat.Tool("function", chat.ToolFunction(tool.name, description, schema, tool.strict)))
    return functions, names


def _description_and_schema(tool: ToolDefinition, path: str) -> tuple[str | None, dict[str, Any]]:
    """A tool's description, and the schema of its input."""
    if tool.type in (None, "custom"):
        if tool.input_schema is None:
            param = f"{path}.input_schema"
            raise bad_request(f"{param} is required", param, "missing_required_parameter")
        return "\n".join(_description(tool)) or None, tool.input_schema
    for kind, (description, schema) in _KNOWN.items():
        if tool.type.startswith(kind):
            return description, _OLD_EDITOR if tool.type in _OLD_EDITORS else schema
    raise unsupported(f"{path}.type", f": {quoted(tool.type)}; define a tool of your own with an input_schema")


def _description(tool: ToolDefinition) -> Iterator[str]:
    if tool.description:
        yield tool.description
    if tool.input_examples:
        yield "Examples of its input:"
        yield from (orjson.dumps(example).decode() for example in tool.input_examples)
