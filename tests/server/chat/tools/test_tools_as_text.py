"""Tools on templates that show none: messages tell the model of them, and its calls are read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server.conftest import RunningServer, StartServer, events

CHAT = "/v1/chat/completions"
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
STRICT = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
)
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
PARTS = "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Add things."},
    {
        "role": "assistant",
        "content": "Well:",
        "tool_calls": [
            {"id": str(i), "type": "function", "function": {"name": "add", "arguments": f'{{"a": {i}}}'}}
            for i in (1, 2)
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "one"},
    {"role": "tool", "tool_call_id": "2", "content": "two"},
    {"role": "user", "content": "And what is the sum?"},
]


def prompt_of(server: RunningServer, **body: Any) -> str:
    response = server.post("/v1/chat/completions/render", body)
    assert response.status_code == 200, response.text
    text: str = server.post("/detokenize", {"tokens": response.json()["token_ids"]}).json()["prompt"]
    return text


@pytest.mark.parametrize(
    ("template", "begins"),
    [(CHATML, "<system>Be brief.\n\n# Tools"), (PARTS, "<system>Be brief.\n\n# Tools"), (NO_SYSTEM, "[user]# Tools")],
)
def test_the_model_is_told_of_tools_where_the_template_shows_it(
    start_server: StartServer, template: str, begins: str
) -> None:
    server = start_server(engine={"template": template})
    text = prompt_of(server, messages=[{"role": "system", "content": "Be brief."}, *HISTORY], tools=TOOLS)
    assert text.startswith(begins)
    assert json.dumps(TOOLS[0], separators=(",", ":")) in text
    assert f"Well:\n{CALL}\n<tool_call>" in text
    assert (
        "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\n\nAnd what is the sum?" in text
    )
    assert "# Tools" not in prompt_of(server, messages=HISTORY, tools=TOOLS, tool_choice="none")


def test_turns_alternate(start_server: StartServer) -> None:
    server = start_server(engine={"template": STRICT})
    text = prompt_of(server, messages=HISTORY, tools=TOOLS)
    assert text.startswith("[user]# Tools")
    assert "\n\nAdd things.[assistant]Well:" in text
    # Without tools on offer, the history alone is written so.
    assert prompt_of(server, messages=HISTORY).startswith("[user]Add things.[assistant]Well:")
    refused = server.post(CHAT, {"messages": [*HISTORY, HISTORY[-1]], "tools": TOOLS})
    assert (refused.status_code, "roles must alternate" in refused.text or "no such role" in refused.text) == (
        400,
        True,
    )


def test_calls_are_read_and_follow_their_schema(start_server: StartServer) -> None:
    server = start_server(engine={"template": CHATML})
    body = {"messages": [{"role": "user", "content": f"SAY({CALL})YAS"}], "tools": TOOLS}
    message = server.post(CHAT, body).json()["choices"][0]["message"]
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
    deltas = [
        choice["delta"] for chunk in events(server.post(CHAT, {**body, "stream": True})) for choice in chunk["choices"]
    ]
    assert any(delta.get("tool_calls") for delta in deltas)
    plain = {"messages": [{"role": "user", "content": "SAY(hello)YAS"}], "tools": TOOLS}
    assert server.post(CHAT, plain).json()["choices"][0]["message"]["content"] == "hello"


def test_none_refuses_as_before(start_server: StartServer) -> None:
    server = start_server(engine={"template": CHATML}, tool_call_parser="none")
    response = server.post(CHAT, {"messages": HISTORY[:1], "tools": TOOLS})
    assert (response.status_code, "--tool-call-parser none" in response.text) == (400, True)
