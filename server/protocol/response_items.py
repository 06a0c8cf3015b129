"""Items of `/v1/responses`: what a conversation is made of, as clients send it and as they get it back.

A field that is unset is left out; one that a client sent as null stays null. Members that are not here are passed over:
clients send back what SDKs and other servers made of an item.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

UNSET = msgspec.UNSET
Unset: TypeAlias = msgspec.UnsetType
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, tag="input_text"):
    """Text that the model reads."""

    text: str


class InputImage(msgspec.Struct, tag="input_image", omit_defaults=True):
    """An image, for models that take them. Of one in a tool's result, other models read that there is one."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None


class InputFile(msgspec.Struct, tag="input_file", omit_defaults=True):
    """A file that is an image, as a data: URL in `file_data` or a URL: models here read no others."""

    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    filename: str | None = None
    detail: str | None = None


class OutputText(msgspec.Struct, tag="output_text"):
    """Text that the model wrote."""

    text: str
    annotations: list[Any] | None = msgspec.field(default_factory=list)
    logprobs: list[Any] | None = msgspec.field(default_factory=list)


class Refusal(msgspec.Struct, tag="refusal"):
    """Why a model did not answer."""

    refusal: str


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """What the model thought."""

    text: str


class SummaryText(msgspec.Struct, tag="summary_text"):
    """What another server made of what its model thought."""

    text: str


class Message(msgspec.Struct, tag="message", kw_only=True):
    """Something that was said."""

    id: str | Unset | None = UNSET
    status: Status | Unset | None = UNSET
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | InputFile | OutputText | Refusal]
    phase: str | Unset | None = UNSET


class FunctionCall(msgspec.Struct, tag="function_call", kw_only=True):
    """The model calls a function; `arguments` is JSON text."""

    id: str | Unset | None = UNSET
    status: Status | Unset | None = UNSET
    call_id: str
    name: str
    arguments: str
    is_async: bool | Unset | None = msgspec.field(name="async", default=UNSET)
    namespace: str | Unset | None = UNSET


class CustomToolCall(msgspec.Struct, tag="custom_tool_call", kw_only=True):
    """The model calls a custom tool, which takes text."""

    id: str | Unset | None = UNSET
    status: Status | Unset | None = UNSET
    call_id: str
    name: str
    input: str
    namespace: str | Unset | None = UNSET


class FunctionCallOutput(msgspec.Struct, tag="function_call_output", kw_only=True):
    """What a function returned."""

    id: str | Unset | None = UNSET
    status: Status | Unset | None = UNSET
    call_id: str
    name: str | Unset | None = UNSET
    output: str | list[InputText | InputImage]


class CustomToolCallOutput(msgspec.Struct, tag="custom_tool_call_output", kw_only=True):
    """What a custom tool returned."""

    id: str | Unset | None = UNSET
    status: Status | Unset | None = UNSET
    call_id: str
    output: str | list[InputText | InputImage]


class LocalShellAction(msgspec.Struct, tag="exec", kw_only=True):
    """A program and its arguments."""

    command: list[str]
    env: dict[str, str] = msgspec.field(default_factory=dict)
    timeout_ms: int | Unset | None = UNSET
    user: str | Unset | None = UNSET
    working_directory: str | Unset | None = UNSET


class LocalShellCall(msgspec.Struct, tag="local_shell_call", kw_only=True):
    """The model runs a program on the client's machine."""

    id: str | Unset | None = UNSET
    status: Status | Unset | None = UNSET
    call_id: str
    action: LocalShellAction


class LocalShellCallOutput(msgspec.Struct, tag="local_shell_call_output", kw_only=True):
    """What the program printed. Some clients name the call in `id`."""

    id: str | Unset | None = UNSET
    status: Status | Unset | None = UNSET
    call_id: str | Unset | None = UNSET
    output: str


class ShellAction(msgspec.Struct, kw_only=True):
    """Commands for a shell, and how long and how much each may print."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCall(msgspec.Struct, tag="shell_call", kw_only=True):
    """The model runs commands in the client's shell."""

    id: str | Unset | None = UNSET
    status: Status | Unset | None = UNSET
    call_id: str
    action: ShellAction
    environment: dict[str, Any] | Unset | None = UNSET


class Exit(msgspec.Struct, tag="exit"):
    """A command has ended."""

    exit_code: int


class Timeout(msgspec.Struct, tag="timeout"):
    """A command took too long."""


class CommandOutput(msgspec.Struct):
    """What a command printed, and how it ended."""

    stdout: str
    stderr: str
    outcome: Exit | Timeout


class ShellCallOutput(msgspec.Struct, tag="shell_call_output", kw_only=True):
    """What the commands printed."""

    id: str | Unset | None = UNSET
    status: Status | Unset | None = UNSET
    call_id: str
    output: list[CommandOutput]
    max_output_length: int | Unset | None = UNSET


class CreateFile(msgspec.Struct, tag="create_file"):
    """A new file."""

    path: str
    diff: str


class UpdateFile(msgspec.Struct, tag="update_file"):
    """Changes of a file."""

    path: str
    diff: str


class DeleteFile(msgspec.Struct, tag="delete_file"):
    """The end of a file."""

    path: str


Operation: TypeAlias = CreateFile | UpdateFile | DeleteFile


class ApplyPatchCall(msgspec.Struct, tag="apply_patch_call", kw_only=True):
    """The model changes a file of the client's."""

    id: str | Unset | None = UNSET
    status: Status | Unset | None = UNSET
    call_id: str
    operation: Operation


class ApplyPatchCallOutput(msgspec.Struct, tag="apply_patch_call_output", kw_only=True):
    """What came of the change."""

    id: str | Unset | None = UNSET
    status: Literal["completed", "failed"]
    call_id: str
    output: str | Unset | None = UNSET


class ServerToolItem(msgspec.Struct, kw_only=True):
    """What another server's own tool did. The model is not shown it."""

    id: str | Unset | None = UNSET
    status: str | Unset | None = UNSET


class WebSearchCall(ServerToolItem, tag="web_search_call"):
    """The web was searched."""


class FileSearchCall(ServerToolItem, tag="file_search_call"):
    """Stored files were looked into."""


class ImageGenerationCall(ServerToolItem, tag="image_generation_call"):
    """An image was made."""


class CodeInterpreterCall(ServerToolItem, tag="code_interpreter_call"):
    """Code was run."""


class ToolSearchCall(ServerToolItem, tag="tool_search_call"):
    """Tools were looked for."""


class ToolSearchOutput(ServerToolItem, tag="tool_search_output"):
    """Tools were found."""


class Reasoning(msgspec.Struct, tag="reasoning", kw_only=True):
    """What the model thought, in `content`.

    `encrypted_content` holds the same once more, for clients that ask for it and send nothing else back.
    """

    id: str | Unset | None = UNSET
    status: Status | Unset | None = UNSET
    summary: list[SummaryText] | None = msgspec.field(default_factory=list)
    content: list[ReasoningText] | Unset | None = UNSET
    encrypted_content: str | Unset | None = UNSET


class ItemReference(msgspec.Struct, tag="item_reference"):
    """Stands for an item of a stored response."""

    id: str


AnyServerToolItem: TypeAlias = (
    WebSearchCall | FileSearchCall | ImageGenerationCall | CodeInterpreterCall | ToolSearchCall | ToolSearchOutput
)
BuiltInCall: TypeAlias = LocalShellCall | ShellCall | ApplyPatchCall
BuiltInCallOutput: TypeAlias = LocalShellCallOutput | ShellCallOutput | ApplyPatchCallOutput
Item: TypeAlias = (
    Message
    | FunctionCall
    | FunctionCallOutput
    | CustomToolCall
    | CustomToolCallOutput
    | BuiltInCall
    | BuiltInCallOutput
    | Reasoning
    | AnyServerToolItem
)
OutputItem: TypeAlias = Message | FunctionCall | CustomToolCall | BuiltInCall | Reasoning

ID_PREFIXES: dict[type[Item], str] = {
    Message: "msg",
    FunctionCall: "fc",
    FunctionCallOutput: "fco",
    CustomToolCall: "ctc",
    CustomToolCallOutput: "ctco",
    LocalShellCall: "lsh",
    LocalShellCallOutput: "lsho",
    ShellCall: "sh",
    ShellCallOutput: "sho",
    ApplyPatchCall: "apc",
    ApplyPatchCallOutput: "apco",
    Reasoning: "rs",
    WebSearchCall: "ws",
    FileSearchCall: "fs",
    ImageGenerationCall: "ig",
    CodeInterpreterCall: "ci",
    ToolSearchCall: "tsc",
    ToolSearchOutput: "tso",
}


class ItemList(msgspec.Struct, kw_only=True):
    """A page of the items that a response was made from."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
