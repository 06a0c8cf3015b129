"""Anthropic's `/v1/messages`: the whole answer, and the events of a streamed one."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from .messages import TextBlock, ThinkingBlock, ToolUseBlock


class TokensDetails(msgspec.Struct):
    """How many of the output's tokens were thinking."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct):
    """Tokens so far. Those of the input that were found in the prefix cache are counted apart from the others."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: TokensDetails | msgspec.UnsetType = msgspec.UNSET


OutputBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock
StopReason: TypeAlias = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class OutputMessage(msgspec.Struct, tag="message", kw_only=True):
    """The model's turn."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """How many tokens a conversation has."""

    input_tokens: int


class MessageStart(msgspec.Struct, tag="message_start"):
    """The first event."""

    message: OutputMessage


class Ping(msgspec.Struct, tag="ping"):
    """Says that the stream is alive."""


class ContentBlockStart(msgspec.Struct, tag="content_block_start"):
    """A block begins, at that place of the content."""

    index: int
    content_block: OutputBlock


class TextDelta(msgspec.Struct, tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    """More of what the model thinks."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag="signature_delta"):
    """The signature of what the model thought."""

    signature: str


class InputJsonDelta(msgspec.Struct, tag="input_json_delta"):
    """More of a call's input, as JSON text."""

    partial_json: str


class ContentBlockDelta(msgspec.Struct, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, tag="content_block_stop"):
    """A block is whole."""

    index: int


class StopDelta(msgspec.Struct):
    """Why the model stopped."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    """The answer has ended."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag="message_stop"):
    """The last event."""


MessageEvent: TypeAlias = (
    MessageStart | Ping | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
)
"""Each one's tag is its `type`."""
