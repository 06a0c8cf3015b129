"""Clients' fields that the APIs do not have: accepted where they change nothing, and logged where they might."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from server.conftest import RunningServer, StartProcess, StartServer
from server.processes import ScriptedProcess

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SAY = {"role": "user", "content": "SAY(hi)YAS"}
JSON = {"content-type": "application/json"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    """It reads calls, for tools are among what clients send."""
    return start_server(tool_call_parser="hermes")


@pytest.fixture(scope="module")
def thinking(start_server: StartServer) -> RunningServer:
    """Its template says what `enable_thinking` is."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}[{{ enable_thinking }}]"
    return start_server(chat_template=template)


def prompt_of(server: RunningServer) -> str:
    return bytes(i for i in server.engine.requests[-1].prompt_token_ids if i < 256).decode()


def test_litellm_sends_back_what_it_made_of_an_answer(server: RunningServer) -> None:
    answered = {
        "role": "assistant", "content": None, "function_call": None, "audio": None, "refusal": None,
        "provider_specific_fields": {"refusal": None, "reasoning_content": "Sum."}, "annotations": [],
        "reasoning_content": "Sum.", "images": [],
        "thinking_blocks": [{"type": "thinking", "thinking": "Sum.", "signature": "s", "cache_control": {}}],
        "tool_calls": [{
            "index": 0, "id": "call_1", "type": "function", "provider_specific_fields": {"thought_signature": "x"},
            "caller": {"type": "direct"},
            "function": {"name": "add", "arguments": '{"a": 1}', "provider_specific_fields": None},
        }],
    }  # fmt: skip
    result = {
        "role": "tool", "tool_call_id": "call_1", "name": "add", "content": "3", "is_error": False,
        "cache_control": {"type": "ephemeral"},
    }  # fmt: skip
    tool = {**TOOL, "cache_control": {"type": "ephemeral"}, "function": {**TOOL["function"], "cache_control": {}}}
    body = {"messages": [SAY, answered, result, SAY], "tools": [tool], "tool_choice": "auto"}
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    plain = {
        "messages": [
            SAY,
            {"role": "assistant", "reasoning_content": "Sum.",
             "tool_calls": [{"id": "call_1", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "3", "name": "add"},
            SAY,
        ],
        "tools": [TOOL],
    }  # fmt: skip
    prompt = prompt_of(server)
    assert server.post(CHAT, plain).status_code == 200
    assert prompt == prompt_of(server), "what is ignored must not reach the template"


@pytest.mark.parametrize(
    "message",
    [
        {**SAY, "id": "msg_1", "createdAt": "2026-01-01", "parts": [{"type": "text", "text": "hi"}]},  # AI SDK
        {**SAY, "timestamp": 1, "models": ["m"], "childrenIds": [], "parentId": None},  # Open WebUI
        {"role": "user", "content": [{"type": "text", "text": "SAY(hi)YAS", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "text", "text": "SAY(hi)YAS", "id": "p", "extra_content": {"a": {}}}]},
        {**SAY, "reasoning_details": [{"type": "reasoning.text", "text": "t"}]},  # OpenRouter
    ],
)  # fmt: skip
def test_messages_of_other_clients(server: RunningServer, message: dict[str, Any]) -> None:
    assert server.post(CHAT, {"messages": [message]}).json()["choices"][0]["message"]["content"] == "hi"
    assert server.post("/tokenize", {"messages": [message]}).status_code == 200


def test_claude_code(server: RunningServer) -> None:
    ephemeral = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {
        "model": "scripted", "max_tokens": 2048, "stream": False, "betas": ["interleaved-thinking-2025-05-14"],
        "metadata": {"user_id": "user_1", "session": "s"}, "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "system": [{"type": "text", "text": "You are an agent.", **ephemeral}],
        "tools": [{"name": "Bash", "description": "d", "input_schema": {"type": "object"}, **ephemeral,
                   "eager_input_streaming": True}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "go", "citations": None}]},
            {"role": "assistant", "id": "msg_0", "content": [
                {"type": "thinking", "thinking": "So.", "signature": "", "index": 0},
                {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"a": 1}, "caller": {"type": "direct"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "SAY(hi)YAS"}],
                 "is_error": False, "duration_ms": 3, **ephemeral},
            ]},
        ],
    }  # fmt: skip
    for headers in ({}, {"anthropic-beta": "context-management-2025-06-27"}):
        answer = server.post(f"{MESSAGES}?beta=true", body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["content"] == [{"type": "text", "text": "hi"}]
    count = {key: value for key, value in body.items() if key not in ("max_tokens", "stream", "metadata")}
    assert server.post(f"{MESSAGES}/count_tokens", count).status_code == 200


def test_items_of_other_servers(server: RunningServer) -> None:
    items = [
        {**SAY, "id": "msg_1", "internal": 1},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t", "x": 1}], "format": "y"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "provider_specific_fields": {}},
        {"type": "function_call_output", "call_id": "c", "output": "SAY(hi)YAS", "is_error": False},
    ]
    tool = {"type": "function", "name": "add", "parameters": {}, "cache_control": {"type": "ephemeral"}}
    body = {"input": items, "tools": [tool], "service_tier": "flex", "text": {"verbosity": "low"}, "stream_options": {}}
    answer = server.post(RESPONSES, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][-1]["content"][0]["text"] == "hi"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_habits_are_taken(server: RunningServer, path: str) -> None:
    base = {"messages": [SAY]} if path == CHAT else {"prompt": "SAY(hi)YAS"}
    for habit in (
        {"store": True},
        {"metadata": {"a": [1, {"b": 2}]}},
        {"user": "u"},
        {"service_tier": "flex"},
        {"cache_prompt": True},
        {"keep_alive": "5m"},
        {"keep_alive": -1},
        {"stream_options": {"include_usage": True}},
        *({"verbosity": value} for value in ("low", "high") if path == CHAT),
        *({name: None} for name in ("store", "metadata", "user", "service_tier", "cache_prompt", "keep_alive")),
    ):
        response = server.post(path, {**base, **habit})
        assert response.status_code == 200, (habit, response.text)


def test_enable_thinking_is_the_templates(thinking: RunningServer) -> None:
    for fields, said in (
        ({}, ""),
        ({"enable_thinking": False}, "False"),
        ({"enable_thinking": True}, "True"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "False"),
        ({"reasoning_effort": "none"}, "False"),
    ):
        assert thinking.post(CHAT, {"messages": [SAY], **fields}).status_code == 200
        assert prompt_of(thinking).endswith(f"[{said}]"), fields


def eventually_logged(process: ScriptedProcess, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in process.log:
        assert time.monotonic() < deadline, f"{text} is not in the log:\n{process.log}"
        time.sleep(0.01)


def test_what_has_no_effect_is_said_once(start_process: StartProcess) -> None:
    process = start_process("--disable-access-log")
    long = "long" * 40
    for path, base in ((CHAT, {"messages": [SAY]}), (COMPLETIONS, {"prompt": "SAY(hi)YAS"})):
        for _ in range(3):
            body = {**base, "max_tokens": 2, "store": True, "user": None, "zeal": 1, "a\nb": {"c": [1]}, long: None}
            assert process.client.post(path, json=body).status_code == 200
    assert process.client.post(MESSAGES, json={"messages": [SAY], "max_tokens": 2, "zest": 1}).status_code == 200
    untyped = {"input": [SAY], "max_output_tokens": 2, "zone": 1}
    assert process.client.post(RESPONSES, json=untyped).status_code == 200
    refused = process.client.post(CHAT, json={"messages": [SAY], "stream": True, "stream_options": {"zeal": 1}})
    assert refused.json()["error"]["param"] == "stream_options.zeal"
    eventually_logged(process, "'zest'")
    for name in ("'store'", "'zeal'", r"'a\nb'", "'zone'"):
        assert process.log.count(f"The parameter {name} of requests has no effect: ") == 1
    assert "'user'" not in process.log
    assert long not in process.log
    assert long[:99] in process.log

    flood = json.dumps({"messages": [SAY], "max_tokens": 2, **dict.fromkeys(map(str, range(300)), 0)}).encode()
    for i in range(30):
        content = flood.replace(b'{"messages"', b'{"%d": 0, "messages"' % (1000 + i))
        assert process.client.post(CHAT, content=content, headers=JSON).status_code == 200
    eventually_logged(process, "'1020'")
    assert process.log.count("has no effect") <= 256


def test_a_misspelt_parameter_is_logged_with_what_it_may_be(server: RunningServer, caplog: Any) -> None:
    caplog.set_level("INFO", "tidewheel.server.protocol.decode")
    assert server.post(CHAT, {"messages": [SAY], "temprature": 0}).status_code == 200
    assert "did you mean temperature?" in caplog.text


def test_unknown_parameters_may_be_refused(start_server: StartServer) -> None:
    strict = start_server(unknown_parameters="refuse")
    for path, body in ((CHAT, {"messages": [SAY]}), (RESPONSES, {"input": [SAY]}), ("/tokenize", {"prompt": "a"})):
        error = strict.post(path, {**body, "modle": "m"}).json()["error"]
        assert (error["code"], error["param"]) == ("unknown_parameter", "modle")
        assert "did you mean model?" in error["message"]


@pytest.mark.parametrize("mode", ["warn", "ignore"])
@pytest.mark.parametrize(
    ("path", "body", "fields", "said"),
    [
        (CHAT, {"messages": [SAY]}, {"n_predict": 2}, "send max_tokens"),
        (CHAT, {"messages": [SAY]}, {"grammar": 'root ::= "a"'}, "send response_format"),
        (CHAT, {"messages": [SAY]}, {"mirostat": 2}, "unless it is 0: use top_k"),
        (CHAT, {"messages": [SAY]}, {"system": "Be brief."}, "a message of the role system"),
        (COMPLETIONS, {"prompt": "a" * 2**18}, {"zeal": 1, "repeat_penalty": 1.1}, "send repetition_penalty"),
        (RESPONSES, {"input": [SAY]}, {"max_tokens": 2}, "send max_output_tokens"),
        (RESPONSES, {"input": "a"}, {"reasoning_effort": "low"}, "send reasoning.effort"),
        (MESSAGES, {"messages": [SAY], "max_tokens": 2}, {"stop": ["a"]}, "send stop_sequences"),
        ("/api/chat", {"messages": [SAY]}, {"max_tokens": 2}, "send options.num_predict"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, {"max_tokens": 2}, "send n_predict"),
    ],
)
def test_what_other_servers_call_by_another_name_is_refused(
    start_server: StartServer, mode: str, path: str, body: Any, fields: Any, said: str
) -> None:
    server = start_server(unknown_parameters=mode)
    response = server.post(path, {**body, **fields})
    assert response.status_code == 400, response.text
    assert [*fields][-1] in response.text
    assert said in response.text


def test_what_does_nothing_is_taken_by_any_name(server: RunningServer) -> None:
    idle = {"n_predict": None, "mirostat": 0, "typical_p": 1.0, "top_a": 0, "xtc_probability": 0, "dry_multiplier": 0.0}
    assert server.post(CHAT, {"messages": [SAY], **idle}).status_code == 200
    assert server.post(RESPONSES, {"input": [SAY], "n": 1, **idle}).status_code == 200


def test_unknown_parameters_may_be_ignored(start_server: StartServer) -> None:
    lax = start_server(unknown_parameters="ignore")
    for path, body in (
        (CHAT, {"messages": [SAY]}),
        (COMPLETIONS, {"prompt": "SAY(hi)YAS"}),
        (RESPONSES, {"input": "SAY(hi)YAS"}),
        (MESSAGES, {"messages": [SAY], "max_tokens": 4}),
        ("/tokenize", {"prompt": "a"}),
    ):
        assert lax.post(path, {**body, "zeal": {"a": 1}}).status_code == 200
    wrong = lax.post(CHAT, {"messages": [SAY], "zeal": 1, "prediction": {}})
    assert wrong.json()["error"]["param"] == "prediction", "what is known and not served is refused all the same"
    document = lax.http.get("/openapi.json").json()["components"]["schemas"]
    assert "additionalProperties" not in document["ChatCompletionRequest"]
    assert document["StreamOptions"]["additionalProperties"] is False


def test_paths_may_have_slashes_too_many(server: RunningServer, start_server: StartServer) -> None:
    models = server.http.get("/v1/models").json()
    for path in ("/v1/models/", "/v1//models", "//v1/models", "/v1//models//"):
        response = server.http.get(server.url + path)
        assert (response.status_code, response.json()) == (200, models), path
    for path in ("/v1/chat/completions/", "/v1//chat/completions"):
        assert server.post(path, {"messages": [SAY]}).status_code == 200
    assert server.http.get("/v1/models/scripted/").json()["id"] == "scripted"
    wrong = server.post("/v1//messages", {})
    assert (wrong.status_code, wrong.json()["type"]) == (400, "error")
    # Keys and prefixes are looked for as ever.
    closed = start_server(api_keys=["secret"], root_path="/llm")
    for path in ("/llm/v1//models/", "/llm//v1/models", "/v1/models/"):
        assert closed.http.get(closed.url + path).status_code == 401
        assert closed.http.get(closed.url + path, headers={"x-api-key": "secret"}).status_code == 200, path
    # Proxies hide these, and know them by one spelling.
    for path in ("//metrics", "/metrics//", "//server_info"):
        assert server.http.get(server.url + path, follow_redirects=False).status_code in (307, 404), path
