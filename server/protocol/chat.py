"""`/v1/chat/completions`: the request, the whole answer and the chunks of a streamed one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from tidewheel.engine.errors import quoted

from ..errors import bad_request
from .decode import Ignored, Unsupported, documented, unsupported
from .logprobs import PromptLogprobsList
from .sampling import Count, EndpointSampling, GenerationBody
from .usage import Usage

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_PARTS = 2**14
MAX_TOOLS = 1024
_TOOL_NAME = re.compile(r"[\w.:/@-]{1,128}")

ToolName: TypeAlias = Annotated[str, documented(minLength=1, maxLength=128, pattern=f"^{_TOOL_NAME.pattern}$")]
ReasoningEffort: TypeAlias = Annotated[str, documented(enum=REASONING_EFFORTS)]

# Messages and tools may have members that are not here: clients send back what other servers gave them.


class ImageUrl(msgspec.Struct):
    """Where an image is: `data:image/png;base64,...`, or a URL that the server may fetch."""

    url: str | None = None
    detail: str | None = None


class ContentPart(msgspec.Struct):
    """A part of a message: text, or for models that take them an image (`image_url`, `input_image`) or a video.

    A video is `video_url`, or `video`: the URLs of its frames, of which `fps` are shown in a second.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    detail: str | None = None  # of an image whose image_url is a text
    file_id: str | None = None
    uuid: str | None = None  # the client's name for an image or a video, which is null once the server has it
    video_url: ImageUrl | str | None = None
    video: list[str] | str | None = None
    fps: float | None = None


class PastFunctionCall(msgspec.Struct):
    """A function's name and its arguments, as the client sends them back: JSON text, or what models make of it."""

    name: str
    arguments: Any = None


class PastToolCall(msgspec.Struct):
    """A call that the model made in an earlier turn."""

    id: str
    function: PastFunctionCall
    type: Literal["function"] = "function"


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation, as the client sends it."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[PastToolCall] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name for it
    audio: Unsupported = None
    function_call: Any = None


class ToolFunction(msgspec.Struct, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool on offer."""

    type: Literal["function"]
    function: ToolFunction


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """A function on offer, by its name."""

    name: str


class NamedToolChoice(msgspec.Struct, forbid_unknown_fields=True, tag="function", tag_field="type"):
    """A `tool_choice` that demands a call of one function."""

    function: FunctionName


class AllowedTool(msgspec.Struct, forbid_unknown_fields=True):
    """One of the tools that a request keeps on offer."""

    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class AllowedToolChoice(msgspec.Struct, forbid_unknown_fields=True, tag="allowed_tools", tag_field="type"):
    """A `tool_choice` that leaves some of the tools on offer."""

    allowed_tools: AllowedTools


class CustomToolChoice(msgspec.Struct, tag="custom", tag_field="type"):
    """A `tool_choice` for tools that this server does not have."""


ToolChoice: TypeAlias = (
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice | CustomToolChoice | None
)


class ReasoningOptions(msgspec.Struct):
    """OpenRouter's way to say how much a model thinks, and whether its reasoning is shown."""

    effort: ReasoningEffort | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: Unsupported = None


def frames_per_second(media_io_kwargs: dict[str, Any] | None) -> float | None:
    """How fast a video is whose frames are sent one by one, of a request's `media_io_kwargs`; None: it does not say it.

    Raises ApiError (400) for anything else there.
    """
    given = media_io_kwargs or {}
    video = given.get("video") or {}
    fps = video.get("fps") if isinstance(video, dict) else None
    if given.keys() - {"video"} or not isinstance(video, dict) or video.keys() - {"fps"}:
        raise bad_request(
            "media_io_kwargs of a request may have video.fps alone; set others for all requests with --media-io-kwargs",
            "media_io_kwargs",
            "unsupported_parameter",
        )
    if fps is not None and type(fps) not in (int, float):
        raise bad_request("media_io_kwargs: video.fps must be a number", "media_io_kwargs")
    return fps


class ChatCompletionRequest(GenerationBody, kw_only=True):
    """A body of `/v1/chat/completions`."""

    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, documented(minimum=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None  # the template's variable, as chat_template_kwargs has it
    thinking_token_budget: Annotated[int, documented(minimum=-1)] | None = None  # -1 is as many as there are
    include_reasoning: bool | None = None
    reasoning: ReasoningOptions | None = None  # the three above, where they are not given
    modalities: list[str] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    echo: bool | None = None
    # Prefixes are cached without being asked.
    prompt_cache_options: Ignored = msgspec.field(default_factory=msgspec.Raw)

    functions: Any = None
    function_call: Any = None

    audio: Unsupported = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    web_search_options: Unsupported = None

    def __post_init__(self) -> None:
        if self.reasoning is not None:
            if self.reasoning_effort is None:
                self.reasoning_effort = self.reasoning.effort
            if self.enable_thinking is None:
                self.enable_thinking = self.reasoning.enabled
            if self.include_reasoning is None and self.reasoning.exclude is not None:
                self.include_reasoning = not self.reasoning.exclude

    def check_supported(self) -> None:
        GenerationBody.check_supported(self)
        if self.functions is not None:
            raise unsupported(
                "functions", ': it is deprecated; send tools, each as {"type": "function", "function": ...}'
            )
        if self.function_call is not None:
            raise unsupported(
                "function_call",
                ': it is deprecated; send tool_choice: auto, none or {"type": "function", "function": {"name": ...}}',
            )
        if self.modalities not in (None, ["text"]):
            raise unsupported("modalities", ' unless it is ["text"]')
        if self.best_of is not None and self.best_of > self.num_choices and not self.use_beam_search:
            raise unsupported("best_of", " above n in chats without use_beam_search")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        if self.reasoning_effort is not None and self.reasoning_effort not in REASONING_EFFORTS:
            raise bad_request(
                f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}, got {quoted(self.reasoning_effort)}",
                "reasoning_effort",
            )
        if self.thinking_token_budget is not None and self.thinking_token_budget < -1:
            raise bad_request("thinking_token_budget must be at least 0, or -1 for no limit", "thinking_token_budget")
        self._check_messages()
        self._check_tools()

    def without_effect(self) -> dict[str, str]:
        idle = GenerationBody.without_effect(self)
        if self.verbosity not in (None, "medium"):
            idle["verbosity"] = "ask for the length of answers in a message"
        return idle

    def _check_messages(self) -> None:
        count = len(self.messages)
        for message in self.messages:
            if isinstance(message.content, list):
                count += len(message.content)
            if message.tool_calls:
                count += len(message.tool_calls)
        check_parts(count, "messages")

    def _check_tools(self) -> None:
        choice = self.tool_choice
        allowed = choice.allowed_tools.tools if isinstance(choice, AllowedToolChoice) else ()
        check_tool_count(len(self.tools or ()), "tools")
        check_tool_count(len(allowed), "tool_choice")
        check_tool_names([tool.function.name for tool in self.tools or ()])

    def endpoint_sampling(self) -> EndpointSampling:
        """This endpoint's own spelling of the sampling parameters."""
        names = {"logprobs": "top_logprobs"}
        max_tokens = self.max_tokens
        if self.max_completion_tokens is not None:
            max_tokens = self.max_completion_tokens
            names["max_tokens"] = "max_completion_tokens"
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return EndpointSampling(max_tokens, logprobs, names, prompt_logprobs=self.prompt_logprobs)


def check_parts(count: int, param: str) -> None:
    """Raises ApiError (400) for a conversation of more pieces than one may have, before each is looked at."""
    if count > MAX_PARTS:
        raise bad_request(
            f"{param} may have at most {MAX_PARTS} messages, parts of content and tool calls together, got {count}",
            param,
        )


def check_tool_names(names: Sequence[str]) -> None:
    """Raises ApiError (400) for a name of a tool that no function may have."""
    for i, name in enumerate(names):
        check_tool_name(name, f"tools[{i}].function.name")


def check_tool_name(name: str, param: str) -> None:
    """The same for one name; `param` is the request's field."""
    if not _TOOL_NAME.fullmatch(name):
        raise bad_request(
            f"{param} must be 1 to 128 letters, digits, underscores, dashes, dots, colons, slashes or at signs, "
            f"got {quoted(name)}",
            param,
        )


def check_tool_count(count: int, param: str) -> None:
    """Raises ApiError (400) for more tools than a request may have."""
    if count > MAX_TOOLS:
        raise bad_request(f"{param} may have at most {MAX_TOOLS} tools, got {count}", param)


class FunctionCall(msgspec.Struct):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """One call of a tool by the model."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TopLogprob(msgspec.Struct):
    """A likely token; `bytes` is its text in UTF-8, perhaps a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobEntry(msgspec.Struct):
    """The sampled token and the most likely ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a choice, or of a piece of it."""

    content: list[TokenLogprobEntry]
    refusal: None = None


class ResponseMessage(msgspec.Struct, kw_only=True):
    """The model's turn. The role is that of --response-role."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET  # the same, under vLLM's newer name
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One of the `n` answers."""

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobsList | msgspec.UnsetType = msgspec.UNSET


class FunctionCallDelta(msgspec.Struct, kw_only=True):
    """More of a call's arguments; its first one has the name too."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to the call of that index; its first one has an id and the type."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionCallDelta


class Delta(msgspec.Struct):
    """What a chunk adds to the model's turn."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct):
    """A piece of one of the `n` answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET  # in the first chunk
