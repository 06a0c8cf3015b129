"""Calls that are broken off: no client gets an incomplete call to run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server.conftest import RunningServer, StartServer, events

CHAT = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {"name": "write", "parameters": {"properties": {"text": {"type": "string"}}}}}
]
FORMATS = {
    "hermes": '<tool_call>{"name": "write", "arguments": {"text": "one END two"}}</tool_call>',
    "llama3_json": '{"name": "write", "parameters": {"text": "one END two"}}',
    "qwen3_coder": "<function=write><parameter=text>one END two</parameter></function>",
    "mistral": '[TOOL_CALLS]write[ARGS]{"text": "one END two"}',
    "pythonic": "[write(text='one END two')]",
}


def answers(server: RunningServer, text: str, **body: Any) -> list[tuple[str, str | None, list[str]]]:
    """The finish reason, content and arguments of the answer in one piece, and of a stream."""
    body = {"messages": [{"role": "user", "content": f"SAY({text})YAS"}], "tools": TOOLS, **body}
    (choice,) = server.post(CHAT, body).json()["choices"]
    calls = choice["message"].get("tool_calls") or []
    whole = (choice["finish_reason"], choice["message"]["content"], [call["function"]["arguments"] for call in calls])
    chunks = [chunk["choices"][0] for chunk in events(server.post(CHAT, {**body, "stream": True}))]
    arguments: dict[int, str] = {}
    for chunk in chunks:
        for call in chunk["delta"].get("tool_calls", []):
            arguments[call["index"]] = arguments.get(call["index"], "") + call["function"].get("arguments", "")
    content = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    return [whole, (chunks[-1]["finish_reason"], content or None, list(arguments.values()))]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_broken_off_is_not_to_be_run(start_server: StartServer, name: str) -> None:
    server, text = start_server(tool_call_parser=name), FORMATS[name]
    for reason, content, arguments in answers(server, text):
        assert (reason, content, [json.loads(call) for call in arguments]) == (
            "tool_calls", None, [{"text": "one END two"}]
        )  # fmt: skip
    for fields, expected in (({"stop": "END"}, "stop"), ({"max_tokens": text.index("END")}, "length")):
        for reason, content, arguments in answers(server, text, **fields):
            assert (reason, content) == (expected, None)
            assert all(not call.endswith("}") for call in arguments)


def test_a_stop_string_behind_a_call_leaves_it_whole(start_server: StartServer) -> None:
    server = start_server(tool_call_parser="hermes")
    for stop in ("</tool_call>", "}</tool", "\n"):
        text = FORMATS["hermes"] + "\nMore."
        for reason, content, arguments in answers(server, text, stop=stop):
            assert (content, arguments) == (None, ['{"text": "one END two"}'])
            assert reason == "tool_calls"


def test_what_the_model_itself_leaves_out_is_mended(start_server: StartServer) -> None:
    server = start_server(tool_call_parser="hermes")
    damaged = '<tool_call>\n{"name": "write", "arguments": {"text": "a\n\tb", "more": [1, 2,\n</tool_call>'
    for reason, content, arguments in answers(server, damaged):
        assert (reason, content, len(arguments)) == ("tool_calls", None, 1)
        assert json.loads(arguments[0]) == {"text": "a\n\tb", "more": [1, 2]}
