"""Messages and tools as chat templates expect them: plain dicts, content as one text, tool arguments as objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidewheel.engine.errors import quoted

from ..errors import bad_request
from ..protocol.chat import ContentPart, Message, PastToolCall, Tool
from ..protocol.decode import unsupported
from .image_placeholders import ReadImage
from .tools.past_arguments import past_arguments


def template_messages(messages: Sequence[Message], *, sees_images: bool = False) -> list[dict[str, Any]]:
    """The template's `messages`. In the text of one with images or videos, each has its mark.

    Raises ApiError (400) naming the part that the model cannot read; `sees_images` is for its words.
    """
    if not messages:
        raise bad_request("messages is empty", "messages")
    reads = "text and images" if sees_images else "text"
    return [_template_message(message, f"messages[{i}]", reads) for i, message in enumerate(messages)]


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """The template's `tools`: None when there are none, so that templates need not look into the list."""
    return [msgspec.to_builtins(tool) for tool in tools] if tools else None


def _template_message(message: Message, path: str, reads: str) -> dict[str, Any]:
    if message.role == "function":
        raise unsupported(f"{path}.role", ": 'function' is deprecated; send role tool with a tool_call_id")
    if message.function_call is not None:
        raise unsupported(f"{path}.function_call", ": it is deprecated; send tool_calls")
    # OpenAI's "developer" is what open models were trained to know as "system".
    role = "system" if message.role == "developer" else message.role
    if message.content is None and not message.tool_calls and role != "assistant":
        raise bad_request(f"{path}.content is required", f"{path}.content", "missing_required_parameter")
    content = message.refusal if message.content is None else message.content
    rendered: dict[str, Any] = {"role": role, "content": _text(content, f"{path}.content", reads)}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        rendered["reasoning_content"] = reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [
            _template_tool_call(call, f"{path}.tool_calls[{i}].function") for i, call in enumerate(message.tool_calls)
        ]
    return rendered


def _text(content: str | list[ContentPart] | None, path: str, reads: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content or ()):
        if isinstance(part, ReadImage):
            texts.append(part.mark)
            continue
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal"):
            raise unsupported(f"{path}[{i}].type", f": {quoted(part.type)}; this model reads {reads}")
        if text is None:
            raise bad_request(f"{path}[{i}].{part.type} is required", f"{path}[{i}].{part.type}")
        texts.append(text)
    return "\n".join(texts)


def _template_tool_call(call: PastToolCall, path: str) -> dict[str, Any]:
    try:
        arguments = past_arguments(call.function.arguments)
    except RecursionError:
        raise bad_request(f"{path}.arguments is nested too deeply", f"{path}.arguments") from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
