"""Translates requests of Ollama's API into requests of the chat path and the completion path."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence

from ..protocol import chat
from ..protocol.completions import CompletionRequest
from ..protocol.decode import unsupported
from ..protocol.ollama import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGenerationBody,
    OllamaMessage,
    OllamaOptions,
)
from ..protocol.sampling import GenerationBody
from ..protocol.structured import JsonSchemaFormat, ResponseFormat

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")

FIELD_NAMES = {
    **{name: f"options.{name}" for name in _SAMPLING},
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "enable_thinking": "think",
    "reasoning_effort": "think",
    "response_format": "format",
    "response_format.json_schema": "format",
    "response_format.json_schema.schema": "format",
}
"""The names that fields of chat completions and completions have here, for `renamed_fields`."""


def chat_request(
    body: OllamaChatRequest, model: str | None, *, sees_images: bool
) -> tuple[chat.ChatCompletionRequest, dict[str, str]]:
    """The request for the chat path, and the names of its fields.

    Raises ApiError (400) for values that this server has no way to honour, and for images if the model does not see
    them.
    """
    body.check_supported()
    names = dict(FIELD_NAMES)
    for i, message in enumerate(body.messages or ()):
        names |= _named_images(message.images, f"messages[{i}]", f"messages[{i}].images", sees_images)
    request = _chat(body, model, _messages(body.messages or []))
    request.tools = [chat.Tool("function", tool.function) for tool in body.tools or ()] or None
    return request, names


def generate_request(
    body: OllamaGenerateRequest, model: str | None, *, sees_images: bool
) -> tuple[chat.ChatCompletionRequest, dict[str, str]]:
    """The chat request of a prompt, and the names of its fields. Raises ApiError (400) as `chat_request` does."""
    body.check_supported()
    messages = [chat.Message(role="user", content=_content(body.prompt, body.images))]
    names = {**FIELD_NAMES, "messages": "prompt", "messages[0]": "prompt"}
    if body.system:
        messages.insert(0, chat.Message(role="system", content=body.system))
        names |= {"messages[0]": "system", "messages[1]": "prompt"}
    names |= _named_images(body.images, f"messages[{len(messages) - 1}]", "images", sees_images)
    return _chat(body, model, messages), names


def completion_request(body: OllamaGenerateRequest, model: str | None, default_max_tokens: int) -> CompletionRequest:
    """The request for the completion path, of a prompt without a template. Raises ApiError (400).

    `default_max_tokens` is the context: a completion of its own accord has a few tokens only.
    """
    body.check_supported()
    request = CompletionRequest(model=model, prompt=body.prompt or "", suffix=body.suffix)
    request.logprobs = (body.top_logprobs or 0) if body.logprobs else None
    _set_sampling(request, body)
    if request.max_tokens is None:
        request.max_tokens = default_max_tokens
    return request


def _chat(body: OllamaGenerationBody, model: str | None, messages: list[chat.Message]) -> chat.ChatCompletionRequest:
    request = chat.ChatCompletionRequest(model=model, messages=messages, logprobs=body.logprobs)
    request.top_logprobs = body.top_logprobs if body.logprobs else None
    if body.think is not None:
        request.enable_thinking = request.include_reasoning = bool(body.think)
        request.reasoning_effort = body.think if isinstance(body.think, str) else None
    _set_sampling(request, body)
    if messages and messages[-1].role == "assistant" and not messages[-1].tool_calls:
        request.continue_final_message = True  # a turn that the client has begun is gone on with
    return request


def _set_sampling(request: GenerationBody, body: OllamaGenerationBody) -> None:
    options = body.options or OllamaOptions()
    for name in _SAMPLING:
        setattr(request, name, getattr(options, name))
    request.max_tokens = None if (options.num_predict or 0) < 0 else options.num_predict
    request.repetition_penalty = options.repeat_penalty
    if isinstance(body.format, dict):
        request.response_format = ResponseFormat("json_schema", JsonSchemaFormat("output", body.format))
    elif body.format:
        request.response_format = ResponseFormat("json_object")


def _messages(given: Sequence[OllamaMessage]) -> list[chat.Message]:
    """The messages. Each call gets an id, and each tool's result gets the id of its call."""
    messages: list[chat.Message] = []
    unanswered = _Unanswered(())
    for i, message in enumerate(given):
        content = _content(message.content, message.images)
        made = chat.Message(role=message.role, content=content, reasoning_content=message.thinking)
        if message.tool_calls:
            made.tool_calls = _calls(message, i)
            unanswered = _Unanswered(made.tool_calls)
        elif message.role == "tool":
            made.name = message.tool_name
            made.tool_call_id = message.tool_call_id or unanswered.take(message.tool_name)
        messages.append(made)
    return messages


def _content(text: str | None, images: Sequence[str] | None) -> str | list[chat.ContentPart]:
    """What a message says, behind its images."""
    if not images:
        return text or ""
    parts = [chat.ContentPart("image_url", image_url=f"data:image/any;base64,{image}") for image in images]
    return [*parts, chat.ContentPart("text", text)] if text else parts


def _named_images(images: Sequence[str] | None, message: str, param: str, sees_images: bool) -> dict[str, str]:
    """The names of a message's images."""
    if images and not sees_images:
        raise unsupported(param, ": this model reads text")
    return {f"{message}.content[{i}].image_url": f"{param}[{i}]" for i in range(len(images or ()))}


def _calls(message: OllamaMessage, number: int) -> list[chat.PastToolCall]:
    calls = []
    for i, call in enumerate(message.tool_calls or ()):
        # Nine letters and digits, as Mistral's templates want them.
        call_id = call.id or f"call{number % 1000:03d}{i % 100:02d}"
        calls.append(chat.PastToolCall(call_id, chat.PastFunctionCall(call.function.name, call.function.arguments)))
    return calls


class _Unanswered:
    """The calls of a turn that have no result yet. Each is found in constant time, as clients send thousands."""

    def __init__(self, calls: Sequence[chat.PastToolCall]) -> None:
        self._in_order = OrderedDict((i, call) for i, call in enumerate(calls))
        self._by_name: defaultdict[str | None, deque[int]] = defaultdict(deque)
        for i, call in enumerate(calls):
            self._by_name[call.function.name].append(i)

    def take(self, name: str | None) -> str | None:
        """The id of the first call without a result, of that function if there is one. It then has its result."""
        if not self._in_order:
            return None
        if name in self._by_name:
            call = self._in_order.pop(self._by_name[name].popleft())
        else:
            call = self._in_order.popitem(last=False)[1]
            name = call.function.name
            self._by_name[name].popleft()
        if not self._by_name[name]:
            del self._by_name[name]
        return call.id
