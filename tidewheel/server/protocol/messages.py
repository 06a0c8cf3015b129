"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: requests, the whole answer, and the events of a streamed
one.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from tidewheel.server.errors import bad_request
from tidewheel.server.protocol.decode import Unsupported, unsupported

MIN_THINKING_BUDGET = 1024  # tokens


class TextBlock(msgspec.Struct, tag="text", forbid_unknown_fields=True, omit_defaults=True):
    """Text."""

    text: str
    citations: list[Any] | None = None
    cache_control: Any = None  # prefixes are cached without being asked


class ThinkingBlock(msgspec.Struct, tag="thinking", forbid_unknown_fields=True):
    """What the model thought. `signature` has the same, opaque, for clients that asked not to be shown it."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use", forbid_unknown_fields=True, omit_defaults=True):
    """The model calls a tool."""

    id: str
    name: str
    input: Any
    cache_control: Any = None
    caller: Any = None
    toolset_name: Unsupported = None


class ImageBlock(msgspec.Struct, tag="image"):
    """An image, which this server does not look at."""


class ToolResultBlock(msgspec.Struct, tag="tool_result", forbid_unknown_fields=True):
    """What a tool returned."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    toolset_name: Unsupported = None


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One turn of a conversation, as the client sends it."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the model may call; `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they come
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: Unsupported = None


class AutoChoice(msgspec.Struct, tag="auto", forbid_unknown_fields=True):
    """The model may call tools."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(msgspec.Struct, tag="any", forbid_unknown_fields=True):
    """The model must call one tool or more."""

    disable_parallel_tool_use: bool | None = None


class NamedChoice(msgspec.Struct, tag="tool", forbid_unknown_fields=True):
    """The model must call this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoneChoice(msgspec.Struct, tag="none", forbid_unknown_fields=True):
    """The model must not call tools."""

    disable_parallel_tool_use: bool | None = None


class ThinkingEnabled(msgspec.Struct, tag="enabled", forbid_unknown_fields=True):
    """The model thinks first. The budget is checked, and left to the model to keep."""

    budget_tokens: int
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(msgspec.Struct, tag="adaptive", forbid_unknown_fields=True):
    """The model thinks as much as it finds right."""

    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(msgspec.Struct, tag="disabled", forbid_unknown_fields=True):
    """The model does not think first."""


class OutputFormat(msgspec.Struct, tag="json_schema", tag_field="type", forbid_unknown_fields=True):
    """JSON that matches a schema."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer has to be."""

    effort: str | None = None
    format: OutputFormat | None = None


class RequestMetadata(msgspec.Struct, forbid_unknown_fields=True):
    """About the request; no answer depends on it."""

    user_id: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body of `/v1/messages/count_tokens`. Every field that is not required may be null, as good as absent."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoneChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # an older place for output_config.format
    cache_control: Any = None  # prefixes are cached without being asked
    speed: Literal["standard", "fast"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    context_management: Unsupported = None
    mcp_servers: Unsupported = None
    user_profile_id: Unsupported = None
    workspace_id: Unsupported = None

    def check_supported(self) -> None:
        """Raises ApiError (400) for a value that this server has no way to honour."""
        if self.speed == "fast":
            raise unsupported("speed", " unless it is standard")
        for i, tool in enumerate(self.tools or ()):
            if tool.defer_loading:
                raise unsupported(f"tools[{i}].defer_loading", " unless it is false: there is no tool search")
            if tool.allowed_callers not in (None, ["direct"]):
                raise unsupported(f"tools[{i}].allowed_callers", ' unless it is ["direct"]')
        if isinstance(self.thinking, ThinkingEnabled) and self.thinking.budget_tokens < MIN_THINKING_BUDGET:
            param = "thinking.budget_tokens"
            raise bad_request(f"{param} must be at least {MIN_THINKING_BUDGET}", param)


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A body of `/v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    container: Unsupported = None
    diagnostics: Unsupported = None
    inference_geo: Unsupported = None

    def check_supported(self) -> None:
        CountTokensRequest.check_supported(self)
        if isinstance(self.thinking, ThinkingEnabled) and self.thinking.budget_tokens >= self.max_tokens:
            param = "thinking.budget_tokens"
            raise bad_request(f"{param} must be less than max_tokens, which is {self.max_tokens}", param)


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
