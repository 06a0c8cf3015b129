"""Translates a request of `/v1/messages` into a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..chat.sealed_reasoning import unseal_reasoning
from ..chat.tool_results import UNSEEN_IMAGE
from ..errors import bad_request
from ..protocol import chat
from ..protocol.decode import unsupported
from ..protocol.messages import (
    AnyChoice,
    Block,
    CountTokensRequest,
    FileSource,
    ForeignBlock,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    NamedChoice,
    NoneChoice,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from ..protocol.structured import JsonSchemaFormat, ResponseFormat
from .tools import chat_tools

_FIELD_NAMES = {
    "continue_final_message": "messages",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
}


def chat_request(
    body: CountTokensRequest, *, sees_images: bool = False
) -> tuple[chat.ChatCompletionRequest, dict[str, str]]:
    """The request for the chat path, and the names of its fields for `renamed_fields`.

    Without `sees_images` the model is told of the images in tools' results, and others are refused. Raises ApiError
    (400) for values that this server has no way to honour.
    """
    body.check_supported()
    conversation = _Conversation(body, sees_images=sees_images)
    messages = conversation.messages
    if not body.messages:
        raise bad_request("messages is empty", "messages")
    tools, tool_names = chat_tools(body.tools or ())
    choice = body.tool_choice
    request = chat.ChatCompletionRequest(
        model=body.model,
        messages=messages,
        tools=tools or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=not choice.disable_parallel_tool_use if choice else None,
        reasoning_effort=body.output_config.effort if body.output_config else None,
        response_format=_response_format(body),
        chat_template_kwargs=_template_variables(body),
        include_reasoning=not isinstance(body.thinking, ThinkingDisabled),
    )
    if messages[-1].role == "assistant":
        request.continue_final_message = True  # a turn that the client has begun is gone on with
    if isinstance(body, MessagesRequest):
        request.max_completion_tokens = body.max_tokens
        request.stop = body.stop_sequences
        request.temperature, request.top_p, request.top_k = body.temperature, body.top_p, body.top_k
    return request, {**_FIELD_NAMES, **conversation.names, **tool_names}


class _Conversation:
    """The messages, and the names of what they were made from.

    Templates know instructions only at the beginning, and many refuse others. So instructions amid a conversation are
    told to the user's turn beside them, and not moved to the beginning, where they would change what is cached.
    """

    def __init__(self, body: CountTokensRequest, *, sees_images: bool) -> None:
        self.messages: list[chat.Message] = []
        self.names: dict[str, str] = {}
        self._reminders: list[chat.ContentPart] = []  # that wait for the user's turn
        if body.system:
            self._add(chat.Message(role="system", content=_text(body.system, "system")), "system")
        for i, message in enumerate(body.messages):
            path = f"messages[{i}]"
            if message.role == "system":
                self._instruct(_instructions(message, f"{path}.content"), path)
            else:
                for made in _messages(message, path, sees_images=sees_images):
                    self._add(made, path)
        self._remind(f"messages[{len(body.messages) - 1}]")

    def _add(self, made: _Made | chat.Message, path: str) -> None:
        message, sources = (made, {}) if isinstance(made, chat.Message) else made
        num_before = len(self._reminders) if message.role == "user" else 0
        if message.role == "user" and self._reminders:
            message.content = [*self._reminders, *_parts(message)]
            self._reminders = []
        self._remind(path)
        number = len(self.messages)
        self.names[f"messages[{number}]"] = path
        for i, source in sources.items():
            self.names[f"messages[{number}].content[{num_before + i}].image_url"] = source
        self.messages.append(message)

    def _instruct(self, text: str, path: str) -> None:
        last = self.messages[-1] if self.messages else None
        if last is None:
            self._add(chat.Message(role="system", content=text), path)
            return
        if last.role == "system":
            said = _parts(last)
            said.append(chat.ContentPart("text", text))
            last.content = said
            return
        reminder = chat.ContentPart("text", f"<system-reminder>\n{text}\n</system-reminder>")
        if last.role == "user":
            said = _parts(last)
            said.append(reminder)
            last.content = said
        else:
            self._reminders.append(reminder)

    def _remind(self, path: str) -> None:
        """No user's turn follows: the reminders become one."""
        if self._reminders:
            self.names[f"messages[{len(self.messages)}]"] = path
            self.messages.append(chat.Message(role="user", content=self._reminders))
            self._reminders = []


def _parts(message: chat.Message) -> list[chat.ContentPart]:
    content = message.content
    return [chat.ContentPart("text", content)] if isinstance(content, str) else content or []


def _instructions(message: InputMessage, path: str) -> str:
    if isinstance(message.content, str):
        return message.content
    blocks = []
    for i, block in enumerate(message.content):
        if not isinstance(block, TextBlock):
            raise bad_request(f"{path}[{i}]: turns of the system have text only, not {_kind(block)}", f"{path}[{i}]")
        blocks.append(block)
    return _text(blocks, path)


class _Made(NamedTuple):
    """A message, and the paths of the sources of those parts that are images."""

    message: chat.Message
    sources: dict[int, str]


def _messages(message: InputMessage, path: str, *, sees_images: bool) -> list[_Made]:
    """One turn's messages: each tool's result is one of its own."""
    if isinstance(message.content, str):
        return [_Made(chat.Message(role=message.role, content=message.content), {})]
    made: list[_Made] = []
    parts: list[chat.ContentPart] = []
    sources: dict[int, str] = {}
    calls: list[chat.PastToolCall] = []
    reasoning: list[str] = []
    for i, block in enumerate(message.content):
        where = f"{path}.content[{i}]"
        if isinstance(block, TextBlock):
            parts.append(chat.ContentPart("text", block.text))
        elif isinstance(block, ToolResultBlock):
            if parts:
                made.append(_Made(chat.Message(role=message.role, content=parts), sources))
                parts, sources = [], {}
            made.append(_tool_result(block, where, sees_images=sees_images))
        elif isinstance(block, ImageBlock):
            if not sees_images:
                raise _no_image(where)
            sources[len(parts)] = f"{where}.source"
            parts.append(_image(block, where))
        elif isinstance(block, ForeignBlock):
            continue
        elif message.role != "assistant":
            raise bad_request(f"{where}: only the assistant's turns have {_kind(block)} blocks", where)
        elif isinstance(block, ToolUseBlock):
            function = chat.PastFunctionCall(block.name, block.input)
            calls.append(chat.PastToolCall(block.id, function))
        else:
            reasoning.append(_thought(block, where))
    if parts or calls or reasoning or not made:
        last = chat.Message(role=message.role, content=parts, tool_calls=calls or None)
        last.reasoning_content = "".join(reasoning) or None
        made.append(_Made(last, sources))
    return made


def _image(block: ImageBlock, path: str) -> chat.ContentPart:
    source = block.source
    if isinstance(source, FileSource):
        raise unsupported(f"{path}.source.type", ": 'file'; no files of images are kept, so send base64 or url")
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return chat.ContentPart("image_url", image_url=url)


def _thought(block: ThinkingBlock, path: str) -> str:
    if block.thinking or not block.signature:
        return block.thinking
    return unseal_reasoning(block.signature, f"{path}.signature")


def _tool_result(block: ToolResultBlock, path: str, *, sees_images: bool) -> _Made:
    content = block.content or ""
    # Templates have no place for the fact that a tool failed.
    error = "Error: " if block.is_error else ""
    if sees_images and not isinstance(content, str) and any(isinstance(part, ImageBlock) for part in content):
        parts = [chat.ContentPart("text", error)] if error else []
        sources = {}
        for i, part in enumerate(content):
            if isinstance(part, ImageBlock):
                sources[len(parts)] = f"{path}.content[{i}].source"
                parts.append(_image(part, f"{path}.content[{i}]"))
            else:
                parts.append(chat.ContentPart("text", part.text))
        return _Made(chat.Message(role="tool", content=parts, tool_call_id=block.tool_use_id), sources)
    if not isinstance(content, str):
        content = [TextBlock(UNSEEN_IMAGE) if isinstance(part, ImageBlock) else part for part in content]
    text = error + _text(content, f"{path}.content")
    return _Made(chat.Message(role="tool", content=text, tool_call_id=block.tool_use_id), {})


def _text(content: str | Sequence[TextBlock | ImageBlock], path: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, block in enumerate(content):
        if isinstance(block, ImageBlock):
            raise _no_image(f"{path}[{i}]")
        texts.append(block.text)
    return "\n".join(texts)


def _no_image(path: str) -> Exception:
    return unsupported(f"{path}.type", ": 'image'; this model reads text")


def _kind(block: Block) -> str:
    return str(block.__struct_config__.tag)


def _tool_choice(body: CountTokensRequest) -> chat.ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, NamedChoice):
        return chat.NamedToolChoice(chat.FunctionName(choice.name))
    if isinstance(choice, AnyChoice):
        return "required"
    if isinstance(choice, NoneChoice):
        return "none"
    return "auto" if choice else None


def _response_format(body: CountTokensRequest) -> ResponseFormat | None:
    wanted = (body.output_config and body.output_config.format) or body.output_format
    if wanted is None:
        return None
    return ResponseFormat("json_schema", JsonSchemaFormat("output", wanted.schema))


def _template_variables(body: CountTokensRequest) -> dict[str, Any] | None:
    if body.thinking is None:
        return body.chat_template_kwargs
    enabled = not isinstance(body.thinking, ThinkingDisabled)
    return {"enable_thinking": enabled, **(body.chat_template_kwargs or {})}
