"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: the requests, and the blocks of messages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec

from ..errors import bad_request
from .chat import ReasoningEffort, ToolName, check_parts, check_tool_count
from .decode import Body, Unsupported, documented, unsupported
from .response_tools import NO_SERVER_TOOLS

MIN_THINKING_BUDGET = 1024  # tokens
_IDLE = {
    "diagnostics": "usage says how much of a prompt was cached",
    "fallbacks": "no model declines requests",
    "fallback_credit_token": "no model declines requests",
    "safeguards": "there are none",
}


class TextBlock(msgspec.Struct, tag="text", omit_defaults=True):
    """Text. Blocks may have members that are not here, such as cache_control: prefixes are cached without it."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """What the model thought. `signature` has the same, opaque, for clients that asked not to be shown it."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use", omit_defaults=True):
    """The model calls a tool."""

    id: str
    name: str
    input: Any
    toolset_name: Unsupported = None


class Base64Source(msgspec.Struct, tag="base64"):
    """An image's bytes."""

    media_type: str
    data: str


class UrlSource(msgspec.Struct, tag="url"):
    """Where the server may fetch an image."""

    url: str


class FileSource(msgspec.Struct, tag="file"):
    """A file that a server keeps; this one keeps none of images."""

    file_id: str


class ImageBlock(msgspec.Struct, tag="image"):
    """An image, for models that take them."""

    source: Base64Source | UrlSource | FileSource


class ToolResultBlock(msgspec.Struct, tag="tool_result"):
    """What a tool returned."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock] | None = None
    is_error: bool | None = None
    toolset_name: Unsupported = None


class ForeignBlock(msgspec.Struct):
    """What another server's model or tools left in a conversation. The model is not shown it."""


class AdvisorToolResult(ForeignBlock, tag="advisor_tool_result"):
    """What another model advised."""


class BashCodeExecutionToolResult(ForeignBlock, tag="bash_code_execution_tool_result"):
    """What a command returned."""


class CodeExecutionToolResult(ForeignBlock, tag="code_execution_tool_result"):
    """What code returned."""


class FallbackBlock(ForeignBlock, tag="fallback"):
    """Another model goes on."""


class McpToolListing(ForeignBlock, tag="mcp_tool_listing"):
    """The tools of an MCP server."""


class McpToolResult(ForeignBlock, tag="mcp_tool_result"):
    """What a tool of an MCP server returned."""


class McpToolUse(ForeignBlock, tag="mcp_tool_use"):
    """A tool of an MCP server is called."""


class RedactedThinking(ForeignBlock, tag="redacted_thinking"):
    """Encrypted thoughts."""


class ServerToolUse(ForeignBlock, tag="server_tool_use"):
    """A tool of the server is called."""


class TextEditorCodeExecutionToolResult(ForeignBlock, tag="text_editor_code_execution_tool_result"):
    """What an edit returned."""


class ToolSearchToolResult(ForeignBlock, tag="tool_search_tool_result"):
    """Which tools were found."""


class WebFetchToolResult(ForeignBlock, tag="web_fetch_tool_result"):
    """A page of the web."""


class WebSearchToolResult(ForeignBlock, tag="web_search_tool_result"):
    """What a search of the web found."""


Block: TypeAlias = (
    TextBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | AdvisorToolResult
    | BashCodeExecutionToolResult
    | CodeExecutionToolResult
    | FallbackBlock
    | McpToolListing
    | McpToolResult
    | McpToolUse
    | RedactedThinking
    | ServerToolUse
    | TextEditorCodeExecutionToolResult
    | ToolSearchToolResult
    | WebFetchToolResult
    | WebSearchToolResult
)


class InputMessage(msgspec.Struct):
    """One turn of a conversation, as the client sends it."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


_SERVER_TOOLS = ("advisor_", "code_execution_", "mcp_toolset", "tool_search_tool_", "web_fetch_", "web_search_")


def runs_on_server(kind: str | None) -> bool:
    """Whether tools of this type are run by the servers that have them. Types end in a date."""
    return kind is not None and kind.startswith(_SERVER_TOOLS)


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool that the model may call; `input_schema` is a JSON schema. Anthropic's own tools have a type instead."""

    type: str | None = None
    name: ToolName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[dict[str, Any]] | None = None


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
    """The model thinks first, for at most `budget_tokens` tokens."""

    budget_tokens: Annotated[int, documented(minimum=MIN_THINKING_BUDGET)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: Any = None  # thoughts are taken back from any conversation


class ThinkingAdaptive(msgspec.Struct, tag="adaptive", forbid_unknown_fields=True):
    """The model thinks as much as it finds right."""

    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: Any = None


class ThinkingDisabled(msgspec.Struct, tag="disabled", forbid_unknown_fields=True):
    """The model does not think first."""


class OutputFormat(msgspec.Struct, tag="json_schema", tag_field="type", forbid_unknown_fields=True):
    """JSON that matches a schema."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer has to be."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None
    task_budget: Any = None


class NewThread(msgspec.Struct, tag="create"):
    """Asks the server to keep the conversation. All of it comes again with the next turn if it does not."""


class ContinuedThread(msgspec.Struct, tag="continue"):
    """Goes on with a conversation that the server keeps."""


class CountTokensRequest(Body, kw_only=True):
    """A body of `/v1/messages/count_tokens`. Every field that is not required may be null, as good as absent."""

    generates: ClassVar[bool] = True

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

    # Clients send these to servers that have more.
    anthropic_beta: Any = None
    anthropic_version: Any = None
    betas: Any = None
    context_management: Any = None
    thread: NewThread | ContinuedThread | None = None

    mcp_servers: Unsupported = None
    user_profile_id: Unsupported = None
    workspace_id: Unsupported = None

    def check_supported(self) -> None:
        """Raises ApiError (400) for a value that this server has no way to honour."""
        blocks = [block for message in self.messages if isinstance(message.content, list) for block in message.content]
        results = [block.content for block in blocks if isinstance(block, ToolResultBlock)]
        parts = sum(len(content) for content in results if isinstance(content, list))
        check_parts(len(self.messages) + len(blocks) + parts, "messages")
        check_tool_count(len(self.tools or ()), "tools")
        if self.speed == "fast":
            raise unsupported("speed", " unless it is standard")
        for i, tool in enumerate(self.tools or ()):
            if tool.allowed_callers and "direct" not in tool.allowed_callers and not runs_on_server(tool.type):
                raise unsupported(f"tools[{i}].allowed_callers", ' unless "direct" is among them')
        if isinstance(self.thread, ContinuedThread):
            # Agents know these words, and send the whole conversation then.
            raise bad_request(
                "capability_rejected: beta_header:message-threads-2026-08-12: this server keeps no threads; send all "
                "messages",
                "thread",
            )
        if self.thinking_budget is not None and self.thinking_budget < MIN_THINKING_BUDGET:
            param = "thinking.budget_tokens"
            raise bad_request(f"{param} must be at least {MIN_THINKING_BUDGET}", param)

    @property
    def thinking_budget(self) -> int | None:
        """How many tokens of thoughts there may be, if the client says so."""
        return self.thinking.budget_tokens if isinstance(self.thinking, ThinkingEnabled) else None

    def without_effect(self) -> dict[str, str]:
        idle = {}
        if self.context_management is not None:
            idle["context_management"] = "conversations are rendered as they are sent"
        for name in ("anthropic_beta", "anthropic_version", "betas"):
            if getattr(self, name) is not None:
                idle[name] = "there is one version of this server's API"
        if self.thread is not None:
            idle["thread"] = "conversations are not kept"
        if self.output_config is not None and self.output_config.task_budget is not None:
            idle["output_config.task_budget"] = "max_tokens bounds an answer"
        for kind in {tool.type for tool in self.tools or () if runs_on_server(tool.type)}:
            idle[f"tools of type {kind}"] = NO_SERVER_TOOLS
        return idle


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A body of `/v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    diagnostics: Any = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
    safeguards: Any = None

    billing_policy: Unsupported = None
    compaction: Unsupported = None
    container: Unsupported = None
    inference_geo: Unsupported = None

    def check_supported(self) -> None:
        CountTokensRequest.check_supported(self)
        if self.thinking_budget is not None and self.thinking_budget >= self.max_tokens:
            param = "thinking.budget_tokens"
            raise bad_request(f"{param} must be less than max_tokens, which is {self.max_tokens}", param)

    def without_effect(self) -> dict[str, str]:
        idle = CountTokensRequest.without_effect(self)
        if self.metadata is not None:
            idle["metadata"] = "no answer depends on it"
        for name, reason in _IDLE.items():
            if getattr(self, name) is not None:
                idle[name] = reason
        return idle
