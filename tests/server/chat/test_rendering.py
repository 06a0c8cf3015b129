"""A request's settings for its prompt: whose turn it is, the template, its variables; and OpenAI's parameters."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from openai.types.chat import completion_create_params
from server.conftest import RunningServer, StartServer, events

from tidewheel.server.chat.tools.past_arguments import past_arguments

PATH = "/v1/chat/completions"
ASK = {"role": "user", "content": "SAY(and so on)YAS"}
BEGUN = {"role": "assistant", "content": "Once upon a time "}


def prompt_of(server: RunningServer) -> str:
    return server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids), skip_special_tokens=False)


def chat(server: RunningServer, **body: Any) -> Any:
    response = server.post(PATH, {"messages": [ASK], **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def refused(server: RunningServer, path: str = PATH, **body: Any) -> dict[str, Any]:
    response = server.post(path, {"messages": [ASK], **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.fixture(scope="module")
def trusting(start_server: StartServer) -> RunningServer:
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} [end]\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{{ bos_token }}{{ tone }}{{ documents }}"
    )
    return start_server(
        engine={"template": template},
        trust_request_chat_template=True,
        default_chat_template_kwargs={"tone": "kind"},
    )


def test_the_final_message_is_continued(trusting: RunningServer) -> None:
    assert chat(trusting, messages=[ASK, BEGUN], continue_final_message=True)["content"] == "and so on"
    assert prompt_of(trusting) == "[user] SAY(and so on)YAS [end]\n[assistant] Once upon a time "
    echoed = chat(trusting, messages=[ASK, BEGUN], continue_final_message=True, echo=True)
    assert echoed["content"] == "Once upon a time and so on"


def test_the_role_is_the_servers_only_where_a_turn_begins(start_server: StartServer) -> None:
    server = start_server(response_role="oracle")
    for fields, role in (
        ({}, "oracle"),
        ({"add_generation_prompt": False}, "user"),
        ({"messages": [ASK, BEGUN], "continue_final_message": True}, "assistant"),
    ):
        assert chat(server, **fields)["role"] == role
        stream = events(server.post(PATH, {"messages": [ASK], **fields, "stream": True}))
        assert next(iter(stream))["choices"][0]["delta"]["role"] == role


def test_a_stream_echoes_first(trusting: RunningServer) -> None:
    body = {"messages": [ASK, BEGUN], "continue_final_message": True, "echo": True, "stream": True, "n": 2}
    chunks = [chunk["choices"][0] for chunk in events(trusting.post(PATH, body))]
    for index in range(2):
        contents = [c["delta"].get("content", "") for c in chunks if c["index"] == index]
        assert contents[:2] == ["", "Once upon a time "]
        assert "".join(contents) == "Once upon a time and so on"


def test_an_echo_without_an_assistants_message_is_empty(trusting: RunningServer) -> None:
    assert chat(trusting, echo=True)["content"] == "and so on"


def test_a_turn_cannot_be_continued_and_opened(trusting: RunningServer) -> None:
    error = refused(trusting, messages=[ASK, BEGUN], continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    assert "tool calls" in refused(trusting, messages=[ASK, message], continue_final_message=True)["message"]


def test_a_template_that_hides_the_final_message_cannot_continue_it(trusting: RunningServer) -> None:
    messages, template = [ASK, BEGUN], "{{ messages[0].content }}"
    error = refused(trusting, messages=messages, continue_final_message=True, chat_template=template)
    assert (error["param"], "leaves the final message out" in error["message"]) == ("continue_final_message", True)


def test_a_template_from_the_request(trusting: RunningServer, server: RunningServer) -> None:
    own = "{{ bos_token }}{{ messages[0].content }}"
    assert chat(trusting, chat_template=own)["content"] == "and so on"
    assert prompt_of(trusting) == "<bos>SAY(and so on)YAS"
    assert refused(trusting, chat_template="{% if %}")["param"] == "chat_template"
    for path in (PATH, "/tokenize"):
        error = refused(server, path, chat_template=own)
        assert error["param"] == "chat_template"
        assert "--trust-request-chat-template" in error["message"]


def test_variables_of_the_request_go_first(trusting: RunningServer) -> None:
    chat(trusting)
    assert prompt_of(trusting).endswith("<bos>kind")
    chat(trusting, chat_template_kwargs={"tone": "stern"}, documents=[{"title": "a"}])
    assert prompt_of(trusting).endswith("<bos>stern[{'title': 'a'}]")
    chat(trusting, add_special_tokens=True, add_generation_prompt=False)
    assert prompt_of(trusting).startswith("<bos>[user]")
    assert "[assistant]" not in prompt_of(trusting)


def test_tokenize_renders_as_chat_does(trusting: RunningServer) -> None:
    for fields in (
        {"messages": [ASK]},
        {"messages": [ASK, BEGUN], "continue_final_message": True},
        {"messages": [ASK], "chat_template": "{{ tone }}{{ messages[0].content }}"},
    ):
        chat(trusting, **fields)
        tokens = trusting.post("/tokenize", fields).json()["tokens"]
        assert tokens == list(trusting.engine.requests[-1].prompt_token_ids)


def test_a_refusal_is_what_was_said(server: RunningServer) -> None:
    parts = [{"type": "refusal", "refusal": "No"}, {"type": "text", "text": "sorry", "prompt_cache_breakpoint": {}}]
    messages = [
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "content": parts},
        ASK,
    ]
    chat(server, messages=messages)
    assert prompt_of(server).startswith("<assistant>I cannot.<assistant>No\nsorry<user>")


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"functions": []}, "functions", "send tools"),
    ({"function_call": "auto"}, "function_call", "send tool_choice"),
    ({"messages": [{"role": "function", "name": "f", "content": "3"}]}, "messages[0].role", "role tool"),
    ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call", "send tool_calls"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio", "not supported"),
    ({"verbosity": "huge"}, "verbosity", "huge"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "--speculative-config drafts"),
    ({"reasoning": {"max_tokens": 9}}, "reasoning.max_tokens", "not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "unless"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio", "not supported"),
    ({"web_search_options": {}}, "web_search_options", "not supported"),
    ({"moderation": {"model": "x"}}, "moderation", "not supported"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "custom"),
    *(({"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]}, "messages[0].content[0].type", kind)
      for kind in ("image_url", "input_audio", "video_url", "audio_url", "file")),
]  # fmt: skip


BROKEN = [
    ('{"a": ', "{}"),
    ('{"a": [1, {"b": "x, }y', '{"a": [1, {"b": "x, }y"}]}'),
    ('{"a": 1, "b', '{"a": 1}'),
    ('{"a": {"b": tru', '{"a": {}}'),
    ('{"a": "\\u00', "{}"),
    ("null", "{}"),
    (" ", "{}"),
    ("[]", "{}"),
    ('"{\\"a\\": 1}"', '{"a": 1}'),
    ("[1]", '{"INVALID_JSON": "[1]"}'),
    ('{"a": 1}}', '{"INVALID_JSON": "{\\"a\\": 1}}"}'),
    ("Köln", '{"INVALID_JSON": "Köln"}'),
    ('{"a":1}', '{"a":1}'),
    (None, "{}"),
    ({"a": 1}, '{"a": 1}'),
    ([1], '{"INVALID_JSON": "[1]"}'),
]


@pytest.fixture(scope="module")
def showing(start_server: StartServer) -> RunningServer:
    template = (
        "{{ tools or '' }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% for name, value in c.function.arguments | items %}{{ name }},{% endfor %}{{ c.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    return start_server(engine={"template": template})


@pytest.mark.parametrize(("arguments", "shown"), BROKEN)
def test_broken_arguments_of_past_calls_become_an_object(showing: RunningServer, arguments: Any, shown: str) -> None:
    names = "".join(f"{name}," for name in json.loads(shown))
    function = {"name": "f", "arguments": arguments}
    asked = [
        (PATH, "messages", ASK, {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}),
        ("/api/chat", "messages", ASK, {"role": "assistant", "tool_calls": [{"function": function}]}),
    ]
    if isinstance(arguments, str):
        item = {"type": "function_call", "call_id": "c", **function}
        asked.append(("/v1/responses", "input", ASK, item))
    use = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}
    asked.append(("/v1/messages", "messages", ASK, {"role": "assistant", "content": [use]}, result))
    for path, field, *messages in asked:
        response = showing.post(
            path, {field: messages, "max_tokens": 9} if path == "/v1/messages" else {field: messages}
        )
        assert response.status_code == 200, response.text
        assert prompt_of(showing) == ASK["content"] + names + shown, path


@pytest.mark.parametrize("text", ['{"a":[' * 100_000, '{"a":1,' * 100_000, "[" * 100_000 + "]" * 99_999])
def test_deep_arguments_of_past_calls_stay_text(text: str) -> None:
    assert past_arguments(text) == {"INVALID_JSON": text}


def test_long_arguments_of_past_calls_are_completed() -> None:
    text = '{"a": "' + '\\"{,' * 300_000
    assert past_arguments(text) == {"a": '"{,' * 300_000}


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED)
def test_what_is_not_served_is_refused_by_name(
    server: RunningServer, fields: dict[str, Any], param: str, said: str
) -> None:
    error = refused(server, **fields)
    assert error["param"] == param
    assert said in error["message"]


def test_what_changes_no_answer_is_taken(server: RunningServer) -> None:
    chat(
        server, verbosity="medium", modalities=["text"], prompt_cache_options={"ttl": "30m"}, reasoning_effort="low",
        store=False, user="u", safety_identifier="s", prompt_cache_key="k", service_tier="auto", metadata={"a": "b"},
        include_reasoning=True, echo=False,
    )  # fmt: skip


def test_a_message_goes_back_as_sdks_send_it(server: RunningServer) -> None:
    function = {"name": "f", "arguments": '{"a":1}', "parsed_arguments": {"a": 1}}
    message = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
        "tool_calls": [{**CALL, "function": function, "index": 0}], "parsed": None, "reasoning": None,
    }  # fmt: skip
    chat(server, messages=[message, {"role": "tool", "tool_call_id": "c", "content": "3", "name": "f"}, ASK])
    assert prompt_of(server).startswith('<assistant>[f {"a": 1}][tool c]<tool>3')


def test_openrouters_reasoning_is_that_of_the_other_names(start_server: StartServer) -> None:
    template = "{{ enable_thinking }} {{ reasoning_effort }} {{ messages[0].content }}"
    server = start_server(engine={"template": template}, reasoning_parser="qwen3")
    for given, shown in (
        ({"reasoning": {"effort": "low", "enabled": True}}, "True low"),
        ({"reasoning": {"effort": "none"}}, "False none"),
        ({"reasoning": {"enabled": False}, "enable_thinking": True, "reasoning_effort": "high"}, "True high"),
    ):
        chat(server, **given)
        assert prompt_of(server) == f"{shown} {ASK['content']}"
    assert server.post(PATH, {"messages": [ASK], "reasoning": {"effort": "vast"}}).status_code == 400


def test_every_parameter_of_openais_api_is_known(start_server: StartServer) -> None:
    server = start_server(unknown_parameters="refuse")
    known = get_type_hints(completion_create_params.CompletionCreateParamsStreaming)
    assert len(known) > 30
    for name in known:
        response = server.post(PATH, {"messages": [ASK], name: {"no": "such value"}})
        assert response.status_code in (200, 400), name
        error = response.json().get("error", {})
        assert (error.get("code"), error.get("param")) != ("unknown_parameter", name)
