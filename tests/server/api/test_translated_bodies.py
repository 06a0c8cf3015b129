"""Bodies of `/v1/responses` and `/v1/messages`: whatever is in them, the server does not fail, and goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.conftest import RunningServer, StartServer

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"

words = st.sampled_from(["", "a", "SAY(hi)YAS", "ok", "{}", '{"a": 1}', "\x00", "ü🙂"]) | st.text(max_size=6)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
anything = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(words, v, max_size=3), max_leaves=6
)


def record(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects that are mostly valid."""
    strategies = {name: strategy | anything if i % 3 == 0 else strategy for i, (name, strategy) in
                  enumerate(optional.items())}  # fmt: skip
    return st.fixed_dictionaries(required, optional=strategies)


text_parts = st.lists(
    record({"type": st.sampled_from(["input_text", "output_text", "text", "input_image", "refusal"])},
           {"text": words, "refusal": words, "annotations": st.just([])}), max_size=2,
)  # fmt: skip
items = st.one_of(
    record({"role": st.sampled_from(["user", "assistant", "system", "developer"]), "content": words | text_parts},
           {"type": st.just("message"), "id": words, "status": st.just("completed")}),
    record({"type": st.just("function_call"), "call_id": words, "name": words, "arguments": words}, {"id": words}),
    record({"type": st.just("function_call_output"), "call_id": words, "output": words | text_parts}, {"id": words}),
    record({"type": st.just("reasoning"), "summary": st.just([])}, {"encrypted_content": words, "id": words}),
    anything,
)  # fmt: skip
tools = st.lists(record({"name": words}, {"type": st.sampled_from(["function", "custom", "web_search"]),
                                          "parameters": anything, "input_schema": anything}), max_size=2)  # fmt: skip
response_bodies = record(
    {"input": words | st.lists(items, max_size=4), "max_output_tokens": st.just(4)},
    {"tools": tools, "tool_choice": words | anything, "stream": st.booleans(), "store": st.booleans(),
     "previous_response_id": words, "text": anything, "reasoning": anything, "include": st.lists(words, max_size=1),
     "metadata": st.dictionaries(words, words), "truncation": words, "temperature": scalars, "instructions": words,
     "top_logprobs": st.integers(-1, 3), "stop": words, "background": st.just(False)},
)  # fmt: skip
blocks = st.lists(
    st.one_of(
        record({"type": st.just("text"), "text": words}, {"citations": anything}),
        record({"type": st.just("tool_use"), "id": words, "name": words, "input": anything}, {}),
        record({"type": st.just("tool_result"), "tool_use_id": words}, {"content": words, "is_error": st.booleans()}),
        record({"type": st.just("thinking"), "thinking": words, "signature": words}, {}),
        anything,
    ),
    max_size=3,
)
message_bodies = record(
    {"messages": st.lists(record({"role": st.sampled_from(["user", "assistant", "system"]),
                                  "content": words | blocks}, {}), max_size=3),
     "max_tokens": st.just(4)},
    {"system": words | blocks, "tools": tools, "tool_choice": anything, "stream": st.booleans(), "thinking": anything,
     "stop_sequences": st.lists(words, max_size=2), "temperature": scalars, "output_config": anything},
)  # fmt: skip


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    return start_server(tool_call_parser="hermes", reasoning_parser="qwen3", max_stored_responses=20)


def post(server: RunningServer, path: str, body: Any) -> None:
    response = server.http.post(path, content=json.dumps(body).encode())
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@settings(max_examples=50, deadline=None)
@given(response_bodies)
def test_responses(server: RunningServer, body: Any) -> None:
    post(server, RESPONSES, body)


@settings(max_examples=50, deadline=None)
@given(message_bodies, st.booleans())
def test_messages(server: RunningServer, body: Any, counts: bool) -> None:
    if counts:
        del body["max_tokens"]
    post(server, COUNT if counts else MESSAGES, body)


@pytest.mark.parametrize("depth", [100, 600, 900, 1010, 5000])
def test_deep_nesting_is_served_or_refused(server: RunningServer, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    for path, body in (
        (RESPONSES, f'"input": "a", "tools": [{{"type": "function", "name": "f", "parameters": {{"x": {nested}}}}}]'),
        (RESPONSES, f'"input": "a", "stream": true, "tools": [{{"type": "function", "name": "f", '
         f'"parameters": {{"x": {nested}}}}}]'),
        (RESPONSES, f'"input": "a", "background": true, "stream": true, "tools": [{{"type": "function", "name": "f", '
         f'"parameters": {{"x": {nested}}}}}]'),
        (MESSAGES, '"max_tokens": 4, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": '
         f'[{{"type": "tool_use", "id": "t", "name": "f", "input": {{"x": {nested}}}}}]}}, '
         '{"role": "user", "content": "b"}]'),
    ):  # fmt: skip
        response = server.http.post(path, content=f"{{{body}}}")
        assert response.status_code in (200, 400), response.text


def test_the_server_goes_on(server: RunningServer) -> None:
    body: Any = {"max_tokens": 90, "messages": [{"role": "user", "content": "SAY(still here)YAS"}]}
    assert server.post(MESSAGES, body).json()["content"] == [{"type": "text", "text": "still here"}]
    assert server.post(RESPONSES, {"input": "SAY(here)YAS"}).json()["status"] == "completed"
    assert server.http.get("/health").status_code == 200
    stats = server.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
