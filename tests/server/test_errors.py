"""Bad input: a clear error in OpenAI's shape that names the field, and a server that goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.conftest import RunningServer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "SAY(hi)YAS"}]
GOOD_TOOL = {"type": "function", "function": {"name": "mcp__files.v2:read/all-@größe"}}


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    return error


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", **fields}]}


BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": 3}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [2, "a"]]}, "prompt[1][1]"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [260]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
    (COMPLETIONS, {"prompt": "", "add_special_tokens": False}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt"),
    (COMPLETIONS, {"prompt": "a" * 9000}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": "warm"}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "top_k": 1.5}, "top_k"),
    (COMPLETIONS, {"prompt": "a", "top_k": 2**31}, "top_k"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 5e-324}, "repetition_penalty"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": True}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 129}, "n"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**70}, "seed"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop[0]"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 65}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x", "x" * 4097]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (COMPLETIONS, {"prompt": "a", "logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a" * 9000, "echo": True, "max_tokens": 0}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 8193}, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "a", "request_id": "a\nb"}, "request_id"),
    (COMPLETIONS, {"prompt": [258, 999], "echo": True}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "vllm_xargs": {}}, "vllm_xargs"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "best_of": 129}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [260]}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "bad_words": [""]}, "bad_words"),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["a"] * 1025}, "bad_words"),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["a" * 257]}, "bad_words"),
    (COMPLETIONS, {"prompt": "a", "n_predict": 1}, "n_predict"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": ["hello"]}, "messages[0]"),
    (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, message(content=3), "messages[0].content"),
    (CHAT, message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
    (CHAT, message(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (CHAT, message(content="a" * 9000), "messages"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "web"}]}, "tools[0].type"),
    (CHAT, {"messages": HELLO, "functions": []}, "functions"),
    (CHAT, {"messages": HELLO, "modalities": ["audio"]}, "modalities"),
    (CHAT, {"messages": HELLO, "chat_template": "x"}, "chat_template"),
    (CHAT, {"messages": HELLO, "reasoning_effort": "nope"}, "reasoning_effort"),
    *(
        (
            CHAT,
            {"messages": HELLO, "tools": [GOOD_TOOL, {"type": "function", "function": {"name": name}}]},
            "tools[1].function.name",
        )
        for name in ("", "a b", "a\n", "a" * 129, '"', "<f>", "f()")
    ),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
    ("/detokenize", {"tokens": [999]}, "tokens"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD_FIELDS)
def test_the_field_at_fault_is_named(server: RunningServer, path: str, body: dict[str, Any], param: str) -> None:
    for streamed in ({}, {"stream": True}) if path.startswith("/v1") and "stream_options" not in body else ({},):
        response = server.post(path, {**body, **streamed})
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert error["param"] == param
        assert param.rpartition(".")[2].partition("[")[0] in error["message"]
        assert error["type"] == "invalid_request_error"


def test_the_least_number_of_tokens_is_the_same_for_all(server: RunningServer) -> None:
    for number in (0, -1):
        message = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": number}).json()["error"]["message"]
        assert message == f"max_tokens must be at least 1, got {number}"


def test_values_that_there_are_are_named(server: RunningServer) -> None:
    for body, names in (
        ({"messages": [{"role": "wizard", "content": "a"}]}, "assistant, developer, function, system, tool, user"),
        ({"messages": HELLO, "verbosity": "huge"}, "high, low, medium"),
        ({"messages": HELLO, "tool_choice": "nope"}, "auto, none, required"),
    ):
        assert error_of(server.post(CHAT, body))["message"].endswith(f"; it takes {names}")


def test_a_key_at_fault_is_named(server: RunningServer) -> None:
    for key in ("abc", "1.5", "-1", "", "1_0", "٣"):
        error = error_of(server.post(COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1, key: 1}}))
        assert error["param"] == "logit_bias"
        assert f"{key!r} is not a token id" in error["message"]
    error = error_of(server.post(COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1, "6": 101}}))
    assert "101.0 for token 6" in error["message"]


def test_names_and_efforts_that_clients_send(server: RunningServer) -> None:
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
        assert server.post(CHAT, {"messages": HELLO, "reasoning_effort": effort}).status_code == 200
    for name in (GOOD_TOOL["function"]["name"], "a" * 128):
        tool = {"type": "function", "function": {"name": name}}
        body = {"messages": HELLO, "tools": [tool], "tool_choice": "none"}
        assert server.post(CHAT, body).status_code == 200
    for path, body, param in (
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "nope"}}, "reasoning.effort"),
    ):
        error = error_of(server.post(path, body))
        assert error["param"] == param
        assert error["message"].startswith(param)
    for fields, name in (
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"output_config": {"effort": "nope"}}, "output_config.effort"),
    ):
        refused = server.post("/v1/messages", {"messages": HELLO, "max_tokens": 4, **fields})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(name)


def test_a_prompt_over_the_context_says_by_how_much(server: RunningServer) -> None:
    error = error_of(server.post(COMPLETIONS, {"prompt": "a" * 9000}))
    assert error["code"] == "context_length_exceeded"
    assert "9001" in error["message"]
    assert "8192" in error["message"]


def test_an_unknown_model(server: RunningServer) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "a"})):
        response = server.post(path, {**body, "model": "gpt-9"})
        assert response.status_code == 404
        error = error_of(response)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "scripted" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'{"prompt": "a"', b"hello", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "\\ud800 and on"}', b'{"prompt": NaN}', b'{"prompt": "a"} trailing',
        b'{"metadata": ' + b"[" * 100_000, b'{"messages": ' + b"[" * 100_000, b'{"prompt": 1e400}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_request(server: RunningServer, path: str, body: bytes) -> None:
    response = server.http.post(path, content=body)
    assert response.status_code == 400, response.text
    error_of(response)


def test_nothing_there_and_wrong_methods(server: RunningServer) -> None:
    missing = server.http.get("/v1/nothing")
    assert (missing.status_code, error_of(missing)["type"]) == (404, "not_found_error")
    wrong = server.http.get(CHAT)
    assert wrong.status_code == 405
    assert "POST" in error_of(wrong)["message"]
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize("depth", [100, 300, 600, 900, 2000])
def test_deep_nesting_is_served_or_refused(server: RunningServer, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    tools = f'[{{"type": "function", "function": {{"name": "f", "parameters": {{"x": {nested}}}}}}}]'
    arguments = json.dumps(nested)
    for fields in (
        f'"tools": {tools}',
        f'"chat_template_kwargs": {{"shout": {nested}}}',
        f'"metadata": {{"x": {nested}}}',
        f'"messages": [{{"role": "assistant", "tool_calls": [{{"id": "a", "function": '
        f'{{"name": "f", "arguments": {arguments}}}}}]}}]',
    ):
        messages = "" if '"messages"' in fields else f', "messages": {json.dumps(HELLO)}'
        response = server.http.post(CHAT, content=f'{{{fields}{messages}, "max_tokens": 2}}')
        assert response.status_code in (200, 400), response.text
        if response.status_code == 400:
            error_of(response)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(HELLO),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=8), values, max_size=4),
    max_leaves=12,
)
_FIELDS = [
    "prompt", "messages", "model", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "stream", "echo",
    "stream_options", "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice", "response_format", "metadata",
    "prompt_logprobs", "best_of", "truncate_prompt_tokens", "return_token_ids", "request_id",
    "min_tokens", "stop_token_ids", "chat_template_kwargs", "reasoning_effort", "cache_salt", "priority", "tokens",
]  # fmt: skip
bodies = st.dictionaries(st.sampled_from(_FIELDS), json_values, max_size=4)
valid = {COMPLETIONS: {"prompt": "SAY(a)YAS"}, CHAT: {"messages": HELLO}, "/tokenize": {"prompt": "a"}}


@settings(max_examples=50, deadline=None)
@given(path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize", "/detokenize"]), body=bodies, base=st.booleans())
def test_no_body_is_the_servers_fault(server: RunningServer, path: str, body: dict[str, Any], base: bool) -> None:
    # A long answer would only take time.
    text = json.dumps({**(valid.get(path, {}) if base else {}), "max_tokens": 4, **body}).encode("utf-8", "replace")
    response = server.http.post(path, content=text)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response)


@settings(max_examples=40, deadline=None)
@given(path=st.sampled_from([COMPLETIONS, CHAT, "/tokenize"]), data=st.data())
def test_truncated_and_garbled_bodies(server: RunningServer, path: str, data: st.DataObject) -> None:
    whole = json.dumps(valid[path] | {"max_tokens": 2}).encode()
    cut = data.draw(st.integers(0, len(whole)))
    garbage = data.draw(st.binary(max_size=8))
    response = server.http.post(path, content=whole[:cut] + garbage + whole[cut + len(garbage) :])
    assert response.status_code in (200, 400, 404), response.text


def test_the_server_goes_on(server: RunningServer) -> None:
    assert server.post(COMPLETIONS, {"prompt": "SAY(still here)YAS"}).json()["choices"][0]["text"] == "still here"
    assert server.http.get("/health").status_code == 200
    assert server.engine.stats().num_running == 0
