"""Translates a request of `/v1/messages` into a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidewheel.engine.errors import quoted

from ..chat.sealed_reasoning import unseal_reasoning
from ..errors import bad_request
from ..protocol import chat
from ..protocol.decode import unsupported
from ..protocol.messages import (
    AnyChoice,
    Block,
    CountTokensRequest,
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
)
from ..protocol.structured import JsonSchemaFormat, ResponseFormat

_FIELD_NAMES = {
    "continue_final_message": "messages",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
}


def check_tool_types(body: Any) -> None:
    """Refuses Anthropic's own tools in a body that is no MessagesRequest. Raises ApiError (400)."""
    tools = body.get("tools") if isinstance(body, dict) else None
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise unsupported(f"tools[{i}].type", f": {quoted(kind)}; define a tool of your own with an input_schema")


def chat_request(body: CountTokensRequest) -> tuple[chat.ChatCompletionRequest, dict[str, str]]:
    """The request for the chat path, and the names of its fields for `renamed_fields`.

    Raises ApiError (400) for values that this server has no way to honour.
    """
    body.check_supported()
    messages, names = _conversation(body)
    if not messages:
        raise bad_request("messages is empty", "messages")
    choice = body.tool_choice
    request = chat.ChatCompletionRequest(
        model=body.model,
        messages=messages,
        tools=[
            chat.Tool("function", chat.ToolFunction(tool.name, tool.description, tool.input_schema, tool.strict))
            for tool in body.tools or ()
        ]
        or None,
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
    return request, names


def _conversation(body: CountTokensRequest) -> tuple[list[chat.Message], dict[str, str]]:
    messages: list[chat.Message] = []
    names = dict(_FIELD_NAMES)
    if body.system:
        names["messages[0]"] = "system"
        messages.append(chat.Message(role="system", content=_text(body.system, "system")))
    for i, message in enumerate(body.messages):
        for made in _messages(message, f"messages[{i}]"):
            names[f"messages[{len(messages)}]"] = f"messages[{i}]"
            messages.append(made)
    for i in range(len(body.tools or ())):
        names[f"tools[{i}].function"] = f"tools[{i}]"
        names[f"tools[{i}].function.parameters"] = f"tools[{i}].input_schema"
    return messages, names


def _messages(message: InputMessage, path: str) -> list[chat.Message]:
    """One turn's messages: each tool's result is one of its own."""
    if isinstance(message.content, str):
        return [chat.Message(role=message.role, content=message.content)]
    made: list[chat.Message] = []
    parts: list[chat.ContentPart] = []
    calls: list[chat.PastToolCall] = []
    reasoning: list[str] = []
    for i, block in enumerate(message.content):
        where = f"{path}.content[{i}]"
        if isinstance(block, TextBlock):
            parts.append(chat.ContentPart("text", block.text))
        elif isinstance(block, ToolResultBlock):
            if parts:
                made.append(chat.Message(role=message.role, content=parts))
                parts = []
            made.append(_tool_result(block, where))
        elif isinstance(block, ImageBlock):
            raise _no_image(where)
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
        made.append(last)
    return made


def _thought(block: ThinkingBlock, path: str) -> str:
    if block.thinking or not block.signature:
        return block.thinking
    return unseal_reasoning(block.signature, f"{path}.signature")


def _tool_result(block: ToolResultBlock, path: str) -> chat.Message:
    text = _text(block.content or "", f"{path}.content")
    # Templates have no place for the fact that a tool failed.
    content = f"Error: {text}" if block.is_error else text
    return chat.Message(role="tool", content=content, tool_call_id=block.tool_use_id)


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
