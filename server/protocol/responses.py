"""`/v1/responses`: the request, and the response as it stands at any time."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tidewheel.engine.errors import quoted

from ..errors import bad_request
from .chat import ReasoningEffort, check_parts
from .decode import Body, Ignored, Unsupported, optional_tags, unsupported
from .response_items import (
    CustomToolCallOutput,
    FunctionCallOutput,
    Item,
    ItemReference,
    Message,
    OutputItem,
    Reasoning,
    ShellCallOutput,
)
from .response_tools import NO_SERVER_TOOLS, ResponseTool, ServerTool, ToolChoice, kind_of
from .structured import StructuredOutputsField

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


class PlainFormat(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag="json_object", forbid_unknown_fields=True):
    """A JSON object."""


class JsonSchemaFormat(msgspec.Struct, tag="json_schema", forbid_unknown_fields=True, omit_defaults=True):
    """JSON that matches a schema."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What the answer's text has to be."""

    format: PlainFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """How much the model thinks. Its reasoning is returned as it is, so there is never a summary."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream carries besides the answer."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Body, kw_only=True):
    """A body of `/v1/responses`. Every field may be null, which is as good as absent."""

    generates: ClassVar[bool] = True

    model: str | None = None
    input: str | Annotated[list[Item | ItemReference], optional_tags("message", "item_reference")] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None

    # Accepted because no answer depends on them.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    client_metadata: Ignored = msgspec.field(default_factory=msgspec.Raw)  # Codex's
    max_tool_calls: int | None = None  # of tools that run on the server; there are none

    # vLLM's extras, as in chat completions.
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    priority: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputsField | None = None
    top_k: int | None = None

    conversation: Any = None
    access_programs: Unsupported = None
    background_options: Unsupported = None
    context_management: Unsupported = None
    image: Unsupported = None
    moderation: Unsupported = None
    prompt: Unsupported = None
    enable_response_messages: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    previous_input_messages: Unsupported = None
    vllm_xargs: Unsupported = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens are to have their log-probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def check_input(self) -> None:
        """Raises ApiError (400) for more items and parts than a conversation may have."""
        if isinstance(self.input, list):
            lists = [part for item in self.input for part in _parts_of(item) if isinstance(part, list)]
            check_parts(len(self.input) + sum(map(len, lists)), "input")

    def check_supported(self) -> None:
        """Raises ApiError (400) for a value that this server has no way to honour."""
        if self.conversation is not None:
            raise unsupported("conversation", ": send previous_response_id, or the conversation in input")
        if self.stream and self.stream_options is not None and self.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", " unless it is false")
        check_include(self.include)
        if self.reasoning is not None:
            for name in ("summary", "generate_summary"):
                if getattr(self.reasoning, name) not in (None, "auto"):
                    raise unsupported(f"reasoning.{name}", " unless it is auto: the reasoning itself is returned")
            if self.reasoning.context not in (None, "auto"):
                raise unsupported("reasoning.context", " unless it is auto: the model's chat template decides")
            if self.reasoning.mode not in (None, "standard"):
                raise unsupported("reasoning.mode", " unless it is standard")
        if self.background and self.store is False:
            raise bad_request("background needs store: there would be no way to get the response", "background")

    def without_effect(self) -> dict[str, str]:
        idle = {}
        if self.service_tier not in (None, "auto", "default"):
            idle["service_tier"] = "there is one tier; priority puts requests before others"
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            idle["text.verbosity"] = "ask for the length of answers in the instructions"
        if self.stream_options is not None and not self.stream:
            idle["stream_options"] = "the answer is not streamed"
        for kind in {kind_of(tool) for tool in self.tools or () if isinstance(tool, ServerTool)}:
            idle[f"tools of type {kind}"] = NO_SERVER_TOOLS
        return idle


def _parts_of(item: Item | ItemReference) -> tuple[Any, ...]:
    if isinstance(item, Message):
        return (item.content,)
    if isinstance(item, FunctionCallOutput | CustomToolCallOutput | ShellCallOutput):
        return (item.output,)
    return (item.content, item.summary) if isinstance(item, Reasoning) else ()


def check_include(include: list[str] | None) -> None:
    """Raises ApiError (400) if `include` asks for what only other servers' tools and models have."""
    for name in include or ():
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            raise unsupported("include", f": {quoted(name)}; it takes {LOGPROBS} and {ENCRYPTED_REASONING}")


class InputTokensDetails(msgspec.Struct):
    """How many of the input's tokens were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """How many of the output's tokens were reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class Response(msgspec.Struct, kw_only=True):
    """A response, be it unfinished; with what it was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    completed_at: int | None = None
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: ToolChoice
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(msgspec.Struct):
    """That a response is gone."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    """How many tokens an input has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
