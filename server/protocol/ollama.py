"""Ollama's API: the requests."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ..errors import bad_request
from .chat import ToolFunction, check_parts, check_tool_count, check_tool_names
from .decode import Body, Ignored, Unsupported, is_given, unsupported
from .sampling import Count

_IDLE_OPTIONS = {
    "num_ctx": "the context is the server's (--max-model-len)",
    "num_keep": "no part of a prompt is dropped",
    "repeat_last_n": "repeat_penalty is for the whole text",
    "penalize_newline": "line ends are tokens like others",
    "mirostat_tau": "there is no mirostat",
    "mirostat_eta": "there is no mirostat",
}
_LOADING = "the server's options set how the model is loaded"
# Samplers that are not here, and the values with which they do nothing.
_OFF = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}


class OllamaOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters, and others that have no effect. `num_predict` below 0 is as many tokens as fit."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None

    num_ctx: int | None = None
    num_keep: int | None = None
    repeat_last_n: int | None = None
    penalize_newline: bool | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None

    embedding_only: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    low_vram: bool | None = None
    main_gpu: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    use_mlock: bool | None = None
    use_mmap: bool | None = None
    vocab_only: bool | None = None

    def check_supported(self) -> None:
        """Raises ApiError (400) for a sampler that this server does not have."""
        for name, off in _OFF.items():
            if getattr(self, name) not in (None, off):
                raise unsupported(f"options.{name}", f" unless it is {off}: use top_k, top_p and min_p")

    def without_effect(self) -> dict[str, str]:
        """The samplers that were given and do nothing, with the reason."""
        loading = self.__struct_fields__[self.__struct_fields__.index("embedding_only") :]
        reasons = {**_IDLE_OPTIONS, **dict.fromkeys(loading, _LOADING)}
        return {f"options.{name}": why for name, why in reasons.items() if getattr(self, name) is not None}


class OllamaBody(Body, kw_only=True):
    """What the requests for tokens and for vectors have in common."""

    model: str | None = None
    options: OllamaOptions | None = None
    keep_alive: Ignored = msgspec.field(default_factory=msgspec.Raw)

    def without_effect(self) -> dict[str, str]:
        idle = {} if self.options is None else self.options.without_effect()
        if is_given(self.keep_alive):
            idle["keep_alive"] = "the model stays loaded"
        return idle


class OllamaGenerationBody(OllamaBody, kw_only=True):
    """A request for tokens. The answer is streamed unless `stream` is false."""

    generates: ClassVar[bool] = True

    stream: bool | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    format: dict[str, Any] | str | None = None  # json, or a JSON schema
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    truncate: bool | None = None
    shift: bool | None = None

    def check_supported(self) -> None:
        """Raises ApiError (400) for a value that this server has no way to honour."""
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise bad_request('format must be "json" or a JSON schema', "format")
        if self.options is not None:
            self.options.check_supported()

    def without_effect(self) -> dict[str, str]:
        idle = OllamaBody.without_effect(self)
        if self.shift is not None:
            idle["shift"] = "an answer ends where the context does"
        return idle


# Messages and tools may have members that are not here, as in OpenAI's API.


class OllamaFunctionCall(msgspec.Struct):
    """A function's name and its arguments."""

    name: str
    arguments: Any = None


class OllamaPastCall(msgspec.Struct):
    """A call that the model made in an earlier turn."""

    function: OllamaFunctionCall
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One turn of a conversation, as the client sends it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaPastCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(msgspec.Struct):
    """A tool on offer."""

    function: ToolFunction
    type: Literal["function"] | None = "function"


class OllamaChatRequest(OllamaGenerationBody, kw_only=True):
    """A body of `/api/chat`. Without messages, nothing is generated: clients load models so."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None

    def check_supported(self) -> None:
        OllamaGenerationBody.check_supported(self)
        messages = self.messages or []
        parts = sum(len(message.tool_calls or ()) + len(message.images or ()) for message in messages)
        check_parts(len(messages) + parts, "messages")
        check_tool_count(len(self.tools or ()), "tools")
        check_tool_names([tool.function.name for tool in self.tools or ()])


class OllamaGenerateRequest(OllamaGenerationBody, kw_only=True):
    """A body of `/api/generate`. Without a prompt or images, nothing is generated: clients load models so.

    `raw` is a prompt that goes to the model as it is, `suffix` what comes after the answer.
    """

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None

    width: Unsupported = None
    height: Unsupported = None
    steps: Unsupported = None

    @property
    def continues_text(self) -> bool:
        """Whether the prompt is not put into the chat template."""
        return bool(self.raw or self.suffix)

    def check_supported(self) -> None:
        OllamaGenerationBody.check_supported(self)
        check_parts(len(self.images or ()), "images")
        if self.template:
            raise unsupported("template", ": send raw with a prompt that you have made, or use --chat-template")
        if self.context:
            raise unsupported("context", ": send the conversation's messages to /api/chat")
        if self.system and self.continues_text:
            raise bad_request("system cannot be given with raw or suffix, which have no messages", "system")
        if self.images and self.continues_text:
            raise bad_request("images cannot be given with raw or suffix, which have no messages", "images")
        if self.think and self.continues_text:
            raise bad_request("think cannot be given with raw or suffix, which have no messages", "think")


class OllamaEmbedRequest(OllamaBody, kw_only=True):
    """A body of `/api/embed`. Texts that are too long are cut unless `truncate` is false."""

    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddingsRequest(OllamaBody, kw_only=True):
    """A body of `/api/embeddings`, which is older."""

    prompt: str


class OllamaShowRequest(Body, kw_only=True):
    """A body of `/api/show`. `name` is an older spelling of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None

    def without_effect(self) -> dict[str, str]:
        return {} if self.verbose is None else {"verbose": "a model's tensors and vocabulary are not listed"}


class OllamaNamedModel(Body, kw_only=True):
    """A body with a model's name. `name` is an older spelling of `model`."""

    model: str | None = None
    name: str | None = None

    def asked(self) -> str:
        """The name. Raises ApiError (400) without one."""
        if not (asked := self.model or self.name):
            raise bad_request("model is required", "model", "missing_required_parameter")
        return asked


class OllamaPullRequest(OllamaNamedModel, kw_only=True):
    """A body of `/api/pull`. The progress is streamed unless `stream` is false."""

    stream: bool | None = None
    insecure: Ignored = msgspec.field(default_factory=msgspec.Raw)

    def without_effect(self) -> dict[str, str]:
        return {"insecure": "models come from the hub that is configured"} if is_given(self.insecure) else {}


class OllamaCopyRequest(Body, kw_only=True):
    """A body of `/api/copy`."""

    source: str
    destination: str
