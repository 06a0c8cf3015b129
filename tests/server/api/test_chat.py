"""/v1/chat/completions over a socket."""

from __future__ import annotations

from typing import Any

import pytest
from server.conftest import RunningServer, StartServer, events

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "SAY(hello there)YAS"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "ü"}}</tool_call>'


def chat(server: RunningServer, **body: Any) -> Any:
    response = server.post(PATH, {"model": None, "messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: RunningServer, **body: Any) -> list[Any]:
    return events(server.post(PATH, {"messages": HELLO, **body, "stream": True}))


def prompt_of(server: RunningServer) -> str:
    return server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids))


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"SAY({text})YAS"}]


def test_a_whole_answer(server: RunningServer) -> None:
    answer = chat(server)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello there", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("hello there") + 1
    assert answer["system_fingerprint"] == chat(server)["system_fingerprint"]


def test_a_stream(server: RunningServer) -> None:
    chunks = stream(server)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "hello there"
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "stop"
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-1])


def test_usage_chunk(server: RunningServer) -> None:
    chunks = stream(server, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], len("hello there") + 1)


def test_n_choices_each_open_and_finish(server: RunningServer) -> None:
    assert [c["message"]["content"] for c in chat(server, n=3)["choices"]] == ["hello there"] * 3
    chunks = [c["choices"][0] for c in stream(server, n=3)]
    for index in range(3):
        own = [c for c in chunks if c["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in own) == "hello there"
        assert own[-1]["finish_reason"] == "stop"


def test_logprobs(server: RunningServer) -> None:
    content = chat(server, messages=say("aé"), logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "a",
        "logprob": -0.25,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.25, "bytes": [97]},
            {"token": "b", "logprob": -1.25, "bytes": [98]},
        ],
    }
    assert len(content) == len("aé".encode()) + 1
    chunks = stream(server, messages=say("aé"), logprobs=True, top_logprobs=2)
    pieces = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for piece in pieces for entry in piece["content"]] == content
    assert chat(server, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_the_bytes_of_tokens_are_the_answer(server: RunningServer) -> None:
    """Tokens here are bytes, so that characters are parts of several; the special one at the end has no text."""
    said = "Köln 🦩 潮"
    for fields in ({}, {"max_tokens": 3}, {"stop": ["🦩 "], "include_stop_str_in_output": True},
                   {"stop_token_ids": [ord(" ")]}, {"skip_special_tokens": False},
                   {"skip_special_tokens": False, "include_stop_str_in_output": True}):  # fmt: skip
        asked = {"messages": say(said), "logprobs": True, "top_logprobs": 1, **fields}
        choice = chat(server, **asked)["choices"][0]
        entries = choice["logprobs"]["content"]
        assert b"".join(bytes(e["bytes"]) for e in entries).decode(errors="replace") == choice["message"]["content"]
        assert all(len(e["bytes"]) == 1 for e in entries[:-1])
        pieces = [c["choices"][0]["logprobs"] for c in stream(server, **asked) if c["choices"][0]["logprobs"]]
        assert [entry for piece in pieces for entry in piece["content"]] == entries


def test_max_completion_tokens_goes_before_max_tokens(server: RunningServer) -> None:
    choice = chat(server, max_completion_tokens=5, max_tokens=2)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hello", "length")
    assert chat(server, max_tokens=2)["choices"][0]["message"]["content"] == "he"


def test_without_a_limit_an_answer_fills_the_context(start_server: StartServer) -> None:
    small = start_server(engine={"max_model_len": 64})
    answer = chat(small, messages=[{"role": "user", "content": "LOOP("}])
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 64


def test_content_parts_developer_messages_and_template_variables(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be good"}, {"role": "user", "content": parts}]
    chat(server, messages=messages, chat_template_kwargs={"shout": "hey"})
    assert prompt_of(server) == "<system>be good<user>one\ntwoHEY<assistant>"
    chat(server, messages=say("a"), add_generation_prompt=False)
    assert not prompt_of(server).endswith("<assistant>")


@pytest.fixture(scope="module")
def tool_server(start_server: StartServer) -> RunningServer:
    return start_server(tool_call_parser="hermes")


def test_a_conversation_with_tools_reaches_the_template(tool_server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":"é"}'}}
    messages = [
        {"role": "user", "content": "add", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    chat(tool_server, messages=messages, tools=TOOLS)
    assert prompt_of(tool_server) == (
        '<user>add<assistant>[add {"a": "é"}][tool c1]<tool>3'
        '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]'
        "<assistant>"
    )
    chat(tool_server, messages=messages, tools=TOOLS, tool_choice="none")
    assert "properties" not in prompt_of(tool_server)


def test_without_a_parser_tools_that_may_be_called_are_refused_by_all_protocols(
    server: RunningServer, start_server: StartServer
) -> None:
    """Not served as text; what needs no parser works on."""
    schema = {"type": "object", "properties": {}}
    bodies: dict[str, dict[str, Any]] = {
        PATH: {"messages": say(CALL), "tools": TOOLS},
        "/v1/responses": {"input": f"SAY({CALL})YAS", "tools": [{"type": "function", "name": "add"}]},
        "/v1/messages": {"messages": say(CALL), "max_tokens": 200, "tools": [{"name": "add", "input_schema": schema}]},
    }
    off = start_server(tool_call_parser="none")
    for refusing, why in ((server, "how the model writes"), (off, "--tool-call-parser none")):
        for path, body in bodies.items():
            choice: Any = {"type": "auto"} if path == "/v1/messages" else "auto"
            for fields in ({}, {"tool_choice": choice}, {"stream": True}):
                response = refusing.post(path, {**body, **fields})
                assert response.status_code == 400
                error = response.json()["error"]
                assert "--tool-call-parser" in error["message"]
                assert why in error["message"]
                if path != "/v1/messages":
                    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
            none: Any = {"type": "none"} if path == "/v1/messages" else "none"
            assert refusing.post(path, {**body, "tool_choice": none}).status_code == 200
            assert refusing.post(path, {**body, "tools": []}).status_code == 200
    pytest.importorskip("llguidance")
    for tool_choice in ("required", {"type": "function", "function": {"name": "add"}}):
        said = '[{"name": "add", "parameters": {}}]' if tool_choice == "required" else "{}"
        message = chat(server, messages=say(said), tools=TOOLS, tool_choice=tool_choice)["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}


def test_tool_calls(tool_server: RunningServer) -> None:
    choice = chat(tool_server, messages=say(CALL), tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": "ü"}'}
    assert "index" not in call


def test_streamed_tool_calls(tool_server: RunningServer) -> None:
    chunks = [c["choices"][0] for c in stream(tool_server, messages=say(f"Sure.\n{CALL}\n{CALL}"), tools=TOOLS)]
    assert "".join(c["delta"].get("content", "") for c in chunks) == "Sure."
    calls = [call for c in chunks for call in c["delta"].get("tool_calls", [])]
    opening = [call for call in calls if "id" in call]
    assert [call["index"] for call in opening] == [0, 1]
    assert opening[0]["id"] != opening[1]["id"]
    assert [call["function"] for call in opening] == [{"name": "add", "arguments": ""}] * 2
    for index in range(2):
        arguments = "".join(call["function"]["arguments"] for call in calls if call["index"] == index)
        assert arguments == '{"a": 1, "b": "ü"}'
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_one_tool_call_when_they_may_not_be_parallel(tool_server: RunningServer) -> None:
    body = {"messages": say(CALL + CALL), "tools": TOOLS, "parallel_tool_calls": False}
    assert len(chat(tool_server, **body)["choices"][0]["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("extra", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_calls_are_text_when_no_tool_is_on_offer(tool_server: RunningServer, extra: dict[str, Any]) -> None:
    assert chat(tool_server, messages=say(CALL), **extra)["choices"][0]["message"]["content"] == CALL


def test_a_template_of_ones_own(start_server: StartServer) -> None:
    own = start_server(chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}")
    chat(own)
    assert prompt_of(own) == "[SAY(hello there)YAS]"


def test_a_model_without_a_template_says_what_to_do(start_server: StartServer) -> None:
    bare = start_server(engine={"template": ""})
    response = bare.post(PATH, {"messages": HELLO})
    assert response.status_code == 400
    assert "--chat-template" in response.json()["error"]["message"]


@pytest.mark.parametrize("text", ["refuse", "stumble"])
def test_a_templates_complaint_is_a_bad_request(server: RunningServer, text: str) -> None:
    response = server.post(PATH, {"messages": [{"role": "user", "content": text}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert ("no such talk" in response.text) == (text == "refuse")


def test_long_conversations_are_encoded_too(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "y" * 6000}, *HELLO]
    assert chat(server, messages=messages)["choices"][0]["message"]["content"] == "hello there"
