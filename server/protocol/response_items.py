"""Items of `/v1/responses`: what a conversation is made of, as clients send it and as they get it back.

A field that is unset is left out; one that a client sent as null stays null. Members that are not here are passed over:
clients send back what SDKs and other servers made of an item.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from .decode import Unsupported

UNSET = msgspec.UNSET
Unset: TypeAlias = msgspec.UnsetType
Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, tag="input_text"):
    """Text that the model reads."""

    text: str


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
    namespace: Unsupported | Unset = UNSET


class FunctionCallOutput(msgspec.Struct, tag="function_call_output", kw_only=True):
    """What a function returned."""

    id: str | Unset | None = UNSET
    status: Status | Unset | None = UNSET
    call_id: str
    name: str | Unset | None = UNSET
    output: str | list[InputText]
    namespace: Unsupported | Unset = UNSET


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


Item: TypeAlias = Message | FunctionCall | FunctionCallOutput | Reasoning
OutputItem: TypeAlias = Message | FunctionCall | Reasoning

ID_PREFIXES: dict[type[Item], str] = {
    Message: "msg",
    FunctionCall: "fc",
    FunctionCallOutput: "fco",
    Reasoning: "rs",
}


class ItemList(msgspec.Struct, kw_only=True):
    """A page of the items that a response was made from."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
