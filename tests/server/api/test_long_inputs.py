"""Inputs of many megabytes are answered or refused while all other requests are served."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, ServerProcess, StartServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# A server whose threads stand still while it encodes such texts is silent for many times as long.
LONGEST_SILENCE_S = 5.0


@contextmanager
def heard(url: str) -> Iterator[None]:
    """Asks for `/health` all the while. Raises AssertionError if an answer takes too long."""
    ended, slowest = threading.Event(), [0.0]

    def ask() -> None:
        with httpx.Client(timeout=60, trust_env=False) as http:
            while not ended.is_set():
                began = time.monotonic()
                http.get(f"{url}/health").raise_for_status()
                slowest[0] = max(slowest[0], time.monotonic() - began)
                time.sleep(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert slowest[0] < LONGEST_SILENCE_S


def messages(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": messages("a" * 11_500_000)}),
        (CHAT, {"messages": messages("a ") * 10_000}),
        (COMPLETIONS, {"prompt": " " * 12_000_000}),
        (COMPLETIONS, {"prompt": "7" * 10_000_000}),
        (COMPLETIONS, {"prompt": "<|im_start|>" * 1_000_000}),
        (COMPLETIONS, {"prompt": "é" * 250_000}),
        ("/tokenize", {"prompt": "a b " * 3_000_000}),
        ("/v1/messages/count_tokens", {"messages": messages("a b " * 3_000_000)}),
        ("/v1/responses", {"input": "a b " * 3_000_000, "truncation": "auto"}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_far_too_long_texts_are_refused(demo_server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    with heard(demo_server.url):
        response = httpx.post(demo_server.url + path, json=body, timeout=60, trust_env=False)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "2048 tokens" in error["message"]
    assert len(error["message"]) < 300
    assert path.startswith("/v1/messages") or error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/detokenize", {"tokens": [98] * 1_000_000}, 200),
        ("/detokenize", {"tokens": [98] * 3_000_000}, 413),
        ("/tokenize", {"prompt": "a b " * 30_000, "return_token_strs": True}, 200),
        (CHAT, {"messages": messages("") * 60_000}, 413),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "bad_words": [f"{i} " * 50 for i in range(200)]}, 200),
    ],
    ids=["detokenize", "too-many-ids", "token-strings", "messages", "bad-words"],
)
def test_long_lists(demo_server: ServerProcess, path: str, body: dict[str, Any], status: int) -> None:
    with heard(demo_server.url):
        response = httpx.post(demo_server.url + path, json=body, timeout=60, trust_env=False)
    assert response.status_code == status, response.text[:300]


def test_only_the_end_of_a_truncated_text_is_encoded(demo_server: ServerProcess) -> None:
    end = " It was a cold, clear morning; 12345 gulls sat on the wheel."

    def ids(text: str, count: int, side: str | None) -> Any:
        body = {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": count, "truncation_side": side}
        with heard(demo_server.url):
            response = httpx.post(
                demo_server.url + COMPLETIONS, json={**body, "return_token_ids": True}, timeout=60, trust_env=False
            )
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["prompt_token_ids"]

    for count in (5, -1):
        assert ids("the tide " * 1_500_000 + end, count, None) == ids("the tide " * 5000 + end, count, None)
    assert ids(end[1:] + " the tide" * 1_500_000, 15, "right") == ids(end[1:] + " the tide" * 9, 15, "right")
    body = {"messages": messages("the tide " * 1_500_000), "max_tokens": 1, "truncate_prompt_tokens": 7}
    answer = httpx.post(demo_server.url + CHAT, json=body, timeout=60, trust_env=False)
    assert answer.json()["usage"]["prompt_tokens"] == 7


def test_all_prompts_together(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewheel.server.completions.path._MAX_PROMPT_TOKENS", 1000)
    assert server.post(COMPLETIONS, {"prompt": "a" * 1500, "max_tokens": 1}).status_code == 200  # one always may
    assert server.post(COMPLETIONS, {"prompt": ["a" * 400] * 2, "max_tokens": 1}).status_code == 200
    response = server.post(COMPLETIONS, {"prompt": ["a" * 400] * 3, "max_tokens": 1})
    assert response.status_code == 400
    assert "1000 tokens" in response.json()["error"]["message"]


def test_a_conversation_has_no_more_messages_than_it_may(server: RunningServer) -> None:
    for path, field, others in (
        ("/tokenize", "messages", {}),
        (CHAT, "messages", {}),
        ("/v1/responses", "input", {"truncation": "auto", "store": False}),
    ):
        response = server.post(path, {field: messages("") * (2 * 8192 + 1), **others})
        assert response.status_code == 400, response.text
        assert "at most 16384 messages" in response.json()["error"]["message"]


def test_a_template_is_not_broken_by_variables(start_server: StartServer) -> None:
    walks = "{% macro walk(x) %}{% if x %}{{ walk(x[0]) }}{% endif %}{% endmacro %}{{ walk(deep) }}"
    template = f"{walks}{{{{ strftime_now('%Y' * years) }}}}{{{{ messages[0].content }}}}"
    server = start_server(engine={"template": template})
    ask = {"messages": messages("SAY(hello)YAS")}
    deep = json.loads("[" * 400 + "]" * 400)
    for variables, reason in (
        ({"deep": [], "years": 10_000_000}, "at most 1000 characters"),
        ({"deep": deep, "years": 1}, "recursion"),
        ({"deep": [], "years": "a" * 10_000}, "the chat template"),
    ):
        response = server.post(CHAT, {**ask, "chat_template_kwargs": variables})
        assert response.status_code == 400, response.text
        assert reason in response.json()["error"]["message"]
        assert len(response.json()["error"]["message"]) <= 300
    assert server.post(CHAT, {**ask, "chat_template_kwargs": {"deep": [[]], "years": 1}}).status_code == 200
