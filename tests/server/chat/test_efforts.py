"""Efforts of every protocol reach the template by its own names, and models go on to think as messages tell them."""

from __future__ import annotations

from typing import Any

import pytest
from server.conftest import RunningServer, StartServer

HI: list[dict[str, str]] = [{"role": "user", "content": "hi"}]
# Refuses unknown values, and has thinking off by default.
TEMPLATE = (
    "{%- if reasoning_effort is defined and reasoning_effort not in ['low', 'medium', 'xhigh'] %}"
    "{{ raise_exception('unknown effort') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}|{{ reasoning_effort }}|{{ enable_thinking or false }}"
    "{% if thinking_budget %}|{{ thinking_budget }}{% endif %}"
)


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    return start_server(engine={"template": TEMPLATE}, reasoning_parser="qwen3")


def last_prompt(server: RunningServer) -> str:
    return server.engine.tokenizer.decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
KWARGS = {"reasoning_effort": "high", "enable_thinking": False}
CASES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {}, "||False"),
    (CHAT, {"reasoning_effort": "high"}, "|xhigh|True"),
    (CHAT, {"reasoning_effort": "minimal"}, "|low|True"),
    (CHAT, {"reasoning_effort": "none"}, "||False"),
    (CHAT, {"reasoning": {"effort": "xhigh"}}, "|xhigh|True"),
    (CHAT, {"chat_template_kwargs": KWARGS}, "|xhigh|False"),
    (CHAT, {"reasoning_effort": "medium", "thinking_token_budget": 99}, "|medium|True|99"),
    (RESPONSES, {"reasoning": {"effort": "high"}}, "|xhigh|True"),
    (RESPONSES, {"reasoning": {"effort": "none"}}, "||False"),
    (MESSAGES, {"max_tokens": 9, "output_config": {"effort": "max"}}, "|xhigh|True"),
    (MESSAGES, {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "||True|1024"),
    (MESSAGES, {"max_tokens": 9, "thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
     "|xhigh|False"),
    (OLLAMA, {"think": "high"}, "|xhigh|True"),
    (OLLAMA, {"think": "low"}, "|low|True"),
    (OLLAMA, {"think": True}, "||True"),
    (OLLAMA, {"think": False}, "||False"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "shown"), CASES, ids=str)
def test_an_effort_reaches_the_template(server: RunningServer, path: str, fields: dict[str, Any], shown: str) -> None:
    body = {"input": "hi"} if path == RESPONSES else {"messages": HI}
    if path == OLLAMA:
        body |= {"model": server.http.get("/api/tags").json()["models"][0]["name"], "stream": False}
    response = server.post(path, {**body, **fields})
    assert response.status_code == 200, response.text
    assert last_prompt(server) == f"hi{shown}"


@pytest.mark.parametrize("switch", ["/no_think", "/think"])
def test_what_messages_tell_the_model_reaches_it(server: RunningServer, switch: str) -> None:
    """Some models answer with an empty thought: it counts as none."""
    said = f"SAY(<think>\n\n</think>\n\nFour.)YAS {switch}"
    messages = [{"role": "system", "content": switch}, {"role": "user", "content": said}]
    message = server.post(CHAT, {"messages": messages}).json()["choices"][0]["message"]
    assert (message.get("reasoning_content") or "", message["content"]) == ("", "Four.")
    assert last_prompt(server) == f"{switch}{said}||False"
