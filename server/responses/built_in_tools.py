"""Tools that the client runs for OpenAI's models: a shell, and changes of files.

The model gets a function for each. Calls of these functions have their own types of items, and so have the results.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..generation.frames import encode_json
from ..protocol import chat
from ..protocol.response_items import (
    ApplyPatchCall,
    BuiltInCall,
    BuiltInCallOutput,
    CommandOutput,
    LocalShellAction,
    LocalShellCall,
    LocalShellCallOutput,
    Operation,
    ShellAction,
    ShellCall,
    ShellCallOutput,
    Unset,
)
from ..protocol.response_tools import ApplyPatchTool, BuiltInTool, LocalEnvironment, LocalShellTool, ShellTool

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_MILLISECONDS = {"type": "integer", "description": "The longest that it may take, in milliseconds."}
_DIFF = (
    "For create_file, all lines of the file, each after a +. For update_file, the changed places. Each begins with a "
    "line of @@ and, if that helps to find the place, a line of the file that is above it. Unchanged lines follow "
    "after a blank, removed ones after a -, and added ones after a +."
)


def function_of(tool: BuiltInTool) -> chat.ToolFunction:
    """The function that describes a tool to the model."""
    if isinstance(tool, LocalShellTool):
        about = "Runs a program on the user's machine, and returns what it prints."
        command = {**_TEXTS, "description": 'The program and its arguments. A shell is ["sh", "-c", "its command"].'}
        optional: dict[str, Any] = {
            "working_directory": _TEXT,
            "env": {"type": "object", "additionalProperties": _TEXT},
            "timeout_ms": _MILLISECONDS,
        }
        return _function(tool, about, {"command": command}, optional)
    if isinstance(tool, ShellTool):
        about = "Runs commands in a shell on the user's machine. Returns what each prints, and how it ends."
        skills = tool.environment.skills if isinstance(tool.environment, LocalEnvironment) else None
        if skills:
            about += "\n\nThese folders have a SKILL.md, which says how something is done:"
            about += "".join(f"\n- {skill.path} ({skill.name}): {skill.description}" for skill in skills)
        length = {"type": "integer", "description": "The most characters to return of each command."}
        return _function(tool, about, {"commands": _TEXTS}, {"timeout_ms": _MILLISECONDS, "max_output_length": length})
    kinds = {"type": "string", "enum": ["create_file", "update_file", "delete_file"]}
    about = "Creates, changes or deletes a file of the user's."
    return _function(tool, about, {"type": kinds, "path": _TEXT}, {"diff": {**_TEXT, "description": _DIFF}})


def _function(
    tool: BuiltInTool, description: str, required: dict[str, Any], optional: dict[str, Any]
) -> chat.ToolFunction:
    parameters = {
        "type": "object",
        "properties": {**required, **optional},
        "required": [*required],
        "additionalProperties": False,
    }
    return chat.ToolFunction(tool.name, description, parameters)


def call_of(tool: BuiltInTool, call_id: str, arguments: str) -> BuiltInCall | None:
    """The item of a call that the model has written; None if its arguments do not say what to do."""
    try:
        said = msgspec.json.decode(arguments, type=dict[str, Any])
        if isinstance(tool, LocalShellTool):
            if isinstance(said.get("command"), str):
                said["command"] = ["sh", "-c", said["command"]]
            return LocalShellCall(call_id=call_id, action=msgspec.convert(said, LocalShellAction))
        if isinstance(tool, ShellTool):
            if isinstance(said.get("commands"), str):
                said["commands"] = [said["commands"]]
            action = msgspec.convert(said, ShellAction)
            return ShellCall(call_id=call_id, action=action, environment={"type": "local"})
        return ApplyPatchCall(call_id=call_id, operation=msgspec.convert(said, Operation))
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None


def past_call(item: BuiltInCall) -> chat.PastFunctionCall:
    """An earlier call, as the model has written it."""
    if isinstance(item, ApplyPatchCall):
        return chat.PastFunctionCall(ApplyPatchTool.name, encode_json(item.operation).decode())
    tool = LocalShellTool if isinstance(item, LocalShellCall) else ShellTool
    action = msgspec.to_builtins(item.action)
    said = {name: value for name, value in action.items() if name != "type" and value not in (None, {})}
    return chat.PastFunctionCall(tool.name, encode_json(said).decode())


def result_of(item: BuiltInCallOutput) -> str:
    """What the model is shown of a result."""
    if isinstance(item, LocalShellCallOutput):
        return item.output
    if isinstance(item, ShellCallOutput):
        return encode_json([_cut(output, item.max_output_length) for output in item.output]).decode()
    return encode_json({"status": item.status, **({"output": item.output} if item.output else {})}).decode()


def _cut(output: CommandOutput, length: int | Unset | None) -> CommandOutput:
    """As much as the model wants to see of it. Clients send all."""
    if not isinstance(length, int):
        return output
    stdout = output.stdout[: max(length, 0)]
    return CommandOutput(stdout, output.stderr[: max(length - len(stdout), 0)], output.outcome)
