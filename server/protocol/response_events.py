"""Events of a streamed `/v1/responses`. Each has its place in the stream, which counts from 0."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from .response_items import OutputItem, OutputText, ReasoningText
from .responses import Response


class _Event(msgspec.Struct):
    sequence_number: int


class ResponseCreated(_Event, tag="response.created"):
    """The first event."""

    response: Response


class ResponseQueued(_Event, tag="response.queued"):
    """A background response waits for its turn."""

    response: Response


class ResponseInProgress(_Event, tag="response.in_progress"):
    """The response is being made."""

    response: Response


class ResponseCompleted(_Event, tag="response.completed"):
    """The last event of a response that is whole."""

    response: Response


class ResponseIncomplete(_Event, tag="response.incomplete"):
    """The last event of a response that was cut off at its limit of tokens."""

    response: Response


class ResponseFailed(_Event, tag="response.failed"):
    """The last event of a response that failed."""

    response: Response


class OutputItemAdded(_Event, tag="response.output_item.added"):
    """An item begins, at that place of the output."""

    output_index: int
    item: OutputItem


class OutputItemDone(_Event, tag="response.output_item.done"):
    """An item is whole."""

    output_index: int
    item: OutputItem


class _PartEvent(_Event):
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class ContentPartAdded(_PartEvent, tag="response.content_part.added"):
    """A part of an item begins."""


class ContentPartDone(_PartEvent, tag="response.content_part.done"):
    """A part of an item is whole."""


class OutputTextDelta(_Event, tag="response.output_text.delta"):
    """More of the answer's text."""

    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[Any]


class OutputTextDone(_Event, tag="response.output_text.done"):
    """All of the answer's text."""

    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[Any]


class ReasoningTextDelta(_Event, tag="response.reasoning_text.delta"):
    """More of the reasoning."""

    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningTextDone(_Event, tag="response.reasoning_text.done"):
    """All of the reasoning."""

    item_id: str
    output_index: int
    content_index: int
    text: str


class FunctionCallArgumentsDelta(_Event, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class FunctionCallArgumentsDone(_Event, tag="response.function_call_arguments.done"):
    """All of a call's arguments."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class CustomToolCallInputDelta(_Event, tag="response.custom_tool_call_input.delta"):
    """More of the text that a custom tool gets."""

    item_id: str
    output_index: int
    delta: str


class CustomToolCallInputDone(_Event, tag="response.custom_tool_call_input.done"):
    """All of the text that a custom tool gets."""

    item_id: str
    output_index: int
    input: str


ResponseEvent: TypeAlias = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
    | CustomToolCallInputDelta
    | CustomToolCallInputDone
)
"""Each one's tag is its `type`."""
