"""Tools for models whose chat template shows none: as text of the conversation, in the form that Hermes began.

Most models have seen this form, even if their own is another: descriptions in the system message, calls as JSON between
tags, and results between tags in the user's turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_INTRODUCTION = """\
# Tools

You have functions that you may call to answer. Each line between <tools> and </tools> describes one in JSON:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and its arguments between tags, and stop there. The result comes back \
to you:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
Answer without a call where you need none."""


def uses_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are calls or results among the messages."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def introduction(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text that describes a model's tools to it."""
    return _INTRODUCTION.format(tools="\n".join(msgspec.json.encode(tool).decode() for tool in tools))


def with_tools(messages: Sequence[Mapping[str, Any]], intro: str, *, in_system: bool) -> list[dict[str, Any]]:
    """The messages with `intro` in the system message, or else before what the user says first; calls and results as
    text. A result is the user's turn, and so is what the user says after it: many templates want turns to alternate.
    """
    written: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        plain = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
        is_result = message["role"] == "tool"
        if is_result:
            plain = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif calls := message.get("tool_calls"):
            plain["content"] = "\n".join([*([message["content"]] if message["content"] else ()), *map(_call, calls)])
        if follows_result and plain["role"] == "user":
            last = written[-1]
            last["content"] += ("\n" if is_result else "\n\n") + plain["content"]
        else:
            written.append(plain)
        follows_result = is_result
    if not intro:
        return written
    role = "system" if in_system else "user"
    first = next((message for message in written if message["role"] == role), None)
    if first is not None:
        first["content"] = "\n\n".join(text for text in _in_order(first["content"], intro, in_system) if text)
    else:
        written.insert(0, {"role": role, "content": intro})
    return written


def _in_order(content: str, intro: str, in_system: bool) -> tuple[str, str]:
    return (content, intro) if in_system else (intro, content)


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    name = msgspec.json.encode(function["name"]).decode()
    return f'<tool_call>\n{{"name": {name}, "arguments": {function["arguments"]!s}}}\n</tool_call>'
