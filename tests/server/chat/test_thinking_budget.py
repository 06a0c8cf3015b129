"""thinking_token_budget: reasoning ends after its budget, whatever format it has, and a call is not broken off.

A token is a byte here, or a special token. Forced tokens replace those that the script has there.
"""

from __future__ import annotations

from typing import Any

import pytest
from server.conftest import RunningServer, StartServer, events

PATH = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def start(start_server: StartServer, parser: str, specials: list[str], template: str = "", **options: Any) -> Any:
    shown = "{% for m in messages %}{{ m.content }}{% endfor %}" + template
    engine = {"specials": specials, "is_led": True, "template": shown}
    return start_server(engine, reasoning_parser=parser, tool_call_parser="hermes", **options)


def ask(server: RunningServer, said: str, **fields: Any) -> dict[str, Any]:
    response = server.post(PATH, {"messages": [{"role": "user", "content": f"SAY({said})YAS"}], **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def parts(answer: dict[str, Any]) -> tuple[str, str]:
    message = answer["choices"][0]["message"]
    return message.get("reasoning_content") or "", message["content"] or ""


@pytest.fixture(scope="module")
def thinker(start_server: StartServer) -> RunningServer:
    return start(start_server, "qwen3", ["<think>", "</think>"])


@pytest.mark.parametrize(
    ("budget", "reasoning", "content"),
    [
        (0, "", "bcdef</think>Four."),
        (1, "a", "cdef</think>Four."),
        (3, "abc", "ef</think>Four."),
        (6, "abcdef", "Four."),
        (7, "abcdef", "Four."),
        (-1, "abcdef", "Four."),
        (None, "abcdef", "Four."),
    ],
)
def test_reasoning_ends_after_so_many_tokens(
    thinker: RunningServer, budget: int | None, reasoning: str, content: str
) -> None:
    answer = ask(thinker, "<think>abcdef</think>Four.", thinking_token_budget=budget)
    assert parts(answer) == (reasoning, content)
    tags = answer["usage"]["completion_tokens_details"]["reasoning_tokens"] - len(reasoning)
    assert tags == 2
    asked = {"messages": [{"role": "user", "content": "SAY(<think>abcdef</think>Four.)YAS"}], "stream": True}
    deltas = [
        chunk["choices"][0]["delta"] for chunk in events(thinker.post(PATH, {**asked, "thinking_token_budget": budget}))
    ]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == reasoning
    assert "".join(delta.get("content") or "" for delta in deltas) == content


def test_an_answer_without_reasoning_is_left_alone(thinker: RunningServer) -> None:
    assert parts(ask(thinker, "Four. <think>", thinking_token_budget=0)) == ("", "Four. <think>")


def test_each_choice_has_the_budget(thinker: RunningServer) -> None:
    answer = ask(thinker, "<think>abcdef</think>Four.", thinking_token_budget=2, n=3)
    assert [choice["message"]["reasoning_content"] for choice in answer["choices"]] == ["ab"] * 3


def test_what_is_demanded_comes_behind_the_forced_end(thinker: RunningServer) -> None:
    pytest.importorskip("llguidance")
    # The grammar goes on where the script does.
    answer = ask(thinker, "<think>abc{7</think>", thinking_token_budget=3, guided_choice=["7"])
    assert parts(answer) == ("abc", "7")


def test_a_call_that_ends_the_reasoning_is_not_broken_off(thinker: RunningServer) -> None:
    answer = ask(thinker, f"<think>hm{CALL}", tools=TOOLS, thinking_token_budget=20)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "hm"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]
    # Without tools it is a text among the others.
    assert parts(ask(thinker, f"<think>hm{CALL}</think>.", thinking_token_budget=20))[0] == f"hm{CALL}"[:20]


@pytest.mark.parametrize(
    ("parser", "specials", "template", "said", "expected"),
    [
        ("deepseek_r1", [], "", "abcdefghijklmn", ("abc", "lmn")),  # a tag of eight tokens
        ("olmo3", [], "<think>", "abcdefghijklmn", ("abc", "lmn")),
        ("qwen3", ["</think>"], "<think>\n\n</think>\n\n", "abcdef", ("", "abcdef")),
        ("gemma4", ["<|channel>", "<channel|>"], "", "<|channel>thought\nabcdef", ("tho", "ght\nabcdef")),
        ("seed_oss", ["<seed:think>", "</seed:think>"], "", "<seed:think>abcdef", ("abc", "ef")),
        ("kimi_k3", ["<|open|>", "<|close|>", "<|sep|>"], "<|open|>think<|sep|>", "abcdefghijklmn", ("abc", "klmn")),
        ("granite", [], "", f"Here is my thought process: {'x' * 30}", ("xx", "x" * 8)),
        ("muse_glimmer", ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"], "<|start|>assistant",
         " to=self<|message|>abcdef", ("abc", "ef")),
        ("inkling", ["<|content_thinking|>", "<|end_message|>"], "",
         "<|content_thinking|>ab<|end_message|><|content_thinking|>cdef", ("ab", "def")),
    ],
)  # fmt: skip
def test_every_format_has_an_end(
    start_server: StartServer, parser: str, specials: list[str], template: str, said: str, expected: tuple[str, str]
) -> None:
    server = start(start_server, parser, specials, template)
    assert parts(ask(server, said, thinking_token_budget=3)) == expected


def test_a_message_of_reasoning_ends_where_the_format_has_messages(start_server: StartServer) -> None:
    specials = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"]
    engine = {
        "specials": specials,
        "ends": ["<|return|>"],
        "is_led": True,
        "template": "{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant"
        "{% if false %}<|channel|><|message|>{% endif %}",
    }
    server = start_server(engine)
    said = (
        "<|channel|>analysis<|message|>abcd<|start|>assistant<|channel|>analysis<|message|>x"
        "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"
    )
    assert parts(ask(server, said, thinking_token_budget=3)) == ("abc", "Four.")


def test_a_model_whose_reasoning_is_not_known_refuses(start_server: StartServer) -> None:
    server = start(start_server, "none", [])
    for budget in (0, 100):
        response = server.post(PATH, {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": budget})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (
            400, "thinking_token_budget", "unsupported_parameter",
        )  # fmt: skip
        assert "--reasoning-parser" in error["message"]
    assert parts(ask(server, "hi", thinking_token_budget=-1)) == ("", "hi")
    response = server.post(PATH, {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": -2})
    assert "at least 0" in response.json()["error"]["message"]


def test_a_budget_of_messages_is_kept_too(thinker: RunningServer, start_server: StartServer) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = {"messages": [{"role": "user", "content": f"SAY(<think>{'x' * 1100}</think>Four.)YAS"}], "max_tokens": 1500}
    message = thinker.post("/v1/messages", {**asked, "thinking": thinking}).json()
    thought, text = message["content"]
    assert (len(thought["thinking"]), text["text"]) == (1024, "x" * 75 + "</think>Four.")
    plain = start(start_server, "none", [])  # none of it is thinking
    assert plain.post("/v1/messages", {**asked, "thinking": thinking}).status_code == 200
