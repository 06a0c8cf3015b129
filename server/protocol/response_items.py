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


class InputImage(msgspec.Struct, tag="input_image"):
    """An image that a tool returned. The model is told that there is one."""


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
    content: str | list[InputText | OutputText | Refusal]
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
Item: TypeAlias = (
    Message | FunctionCall | FunctionCallOutput | CustomToolCall | CustomToolCallOutput | Reasoning | AnyServerToolItem
)
OutputItem: TypeAlias = Message | FunctionCall | CustomToolCall | Reasoning

ID_PREFIXES: dict[type[Item], str] = {
    Message: "msg",
    FunctionCall: "fc",
    FunctionCallOutput: "fco",
    CustomToolCall: "ctc",
    CustomToolCallOutput: "ctco",
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
