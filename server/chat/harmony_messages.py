"""Conversations as chat templates of the harmony format read them.

Such a template shows one call of a message, and infers from it whose result follows. It shows reasoning that is in
`thinking`, and of instructions only the first message of a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from tidewheel.engine.errors import quoted

from ..errors import bad_request
from ..protocol.decode import unsupported

_EFFORTS = ("low", "medium", "high")
_NEAREST = {"minimal": "low", "xhigh": "high", "max": "high"}
_MAX_PAIRS = 2**23
"""Calls times messages: for each call, gpt-oss's template looks at all messages behind it. This many take it 3 s."""


def harmony_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """A template's variables, with the nearest effort that the model knows.

    Raises ApiError (400) for values that it does not know: its thinking cannot be turned off.
    """
    given = variables.get("reasoning_effort", "low")
    effort = _NEAREST.get(given, given) if isinstance(given, str) else given
    if effort not in _EFFORTS:
        raise bad_request(
            f"reasoning_effort must be one of {', '.join(_EFFORTS)} for this model, got {quoted(str(effort))}",
            "reasoning_effort",
        )
    if tools := variables.get("builtin_tools"):
        names = ", ".join(map(str, tools)) if isinstance(tools, list) else str(tools)
        raise unsupported(
            "chat_template_kwargs.builtin_tools",
            f": {names:.100} would not be run, because this server runs no tools; offer functions in tools",
        )
    return {**variables, "reasoning_effort": effort} if given != effort else dict(variables)


def harmony_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The template's `messages`: all instructions first, then one call in each, with its result behind it.

    What a message with calls says to the user becomes part of its reasoning: the template has no other place for it.
    Raises ApiError (400) if there are so many that the template would take too long.
    """
    num_calls = sum(len(message.get("tool_calls", ())) for message in messages)
    if num_calls * (num_calls + len(messages)) > _MAX_PAIRS:
        raise bad_request(
            f"messages has {num_calls} tool calls in {len(messages)} messages, which are too many for this model's "
            "chat template: leave out the oldest",
            "messages",
        )
    instructions = [message for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    written: list[dict[str, Any]] = []
    if instructions:
        texts = [message["content"] for message in instructions if message["content"]]
        written.append({**instructions[0], "content": "\n\n".join(texts)})
    at = 0
    while at < len(others):
        message = others[at]
        if "reasoning_content" in message:
            message = {**message, "thinking": message["reasoning_content"]}
        at += 1
        if "tool_calls" not in message:
            written.append(message)
            continue
        results: list[dict[str, Any]] = []
        while at < len(others) and others[at]["role"] == "tool":
            results.append(others[at])
            at += 1
        written += _one_by_one(message, results)
    return written


def _one_by_one(message: dict[str, Any], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The message's calls as messages of their own, each before its result."""
    if message.get("thinking") and message["content"]:
        message = {**message, "thinking": f"{message['thinking']}\n\n{message['content']}", "content": ""}
    calls = message["tool_calls"]
    known = {call["id"] for call in calls}
    by_id: dict[str, list[dict[str, Any]]] = {}
    rest: list[dict[str, Any]] = []
    for result in results:
        if result.get("tool_call_id") in known:
            by_id.setdefault(result["tool_call_id"], []).append(result)
        else:
            rest.append(result)
    left = iter(rest)  # results without a known id, which belong to the other calls in turn
    written: list[dict[str, Any]] = []
    for call in calls:
        written.append({**message, "tool_calls": [call]})
        written += by_id.pop(call["id"], ()) or islice(left, 1)
        message = {"role": message["role"], "content": ""}
    return [*written, *left]
