"""Anthropic's `/v1/messages` over a socket: blocks in and out, thinking, counting, and errors in its shape."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, StartServer, named_events

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = {"name": "add", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    return start_server(tool_call_parser="hermes", reasoning_parser="qwen3")


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if len(content) == 1 else list(content)}


def say(text: str) -> dict[str, Any]:
    return user(f"SAY({text})YAS")


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def create(server: RunningServer, *messages: Any, **body: Any) -> Any:
    response = server.post(PATH, {"max_tokens": 300, "messages": list(messages), **body})
    assert response.status_code == 200, response.text
    return response.json()


def text_of(message: Any) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def prompt_of(server: RunningServer) -> str:
    """The last prompt that the engine was given."""
    return server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids))


def error_of(response: httpx.Response) -> Any:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["type", "error", "request_id"]
    assert (body["type"], body["request_id"]) == ("error", response.headers["x-request-id"])
    assert list(body["error"]) == ["type", "message"]
    return body["error"]


# Answers.


def test_a_whole_message(server: RunningServer) -> None:
    message = create(server, say(f"<think>hm</think>Sure.\n{CALL}"), tools=[ADD], system="Be brief.")
    thinking, said, call = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert said == {"type": "text", "text": "Sure."}
    assert call == {"type": "tool_use", "id": call["id"], "name": "add", "input": {"a": 1}}
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "scripted")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": len("<think>hm</think>")}
    assert prompt_of(server).startswith("<system>Be brief.<user>SAY(")


STOPS: list[tuple[str, dict[str, Any], str, str | None, str]] = [
    ("Hello.", {}, "end_turn", None, "Hello."),
    ("", {}, "end_turn", None, ""),
    ("Hello.", {"max_tokens": 2}, "max_tokens", None, "He"),
    ("Hello, you.", {"stop_sequences": ["x", ", "]}, "stop_sequence", ", ", "Hello"),
    (CALL, {"tools": [ADD]}, "tool_use", None, ""),
    (CALL, {"tools": [ADD], "tool_choice": {"type": "none"}}, "end_turn", None, CALL),
]


@pytest.mark.parametrize(("said", "body", "reason", "sequence", "expected"), STOPS)
def test_why_it_stopped(
    server: RunningServer, said: str, body: Any, reason: str, sequence: str | None, expected: str
) -> None:
    message = create(server, say(said), **body)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert text_of(message) == expected


def test_a_full_context_is_told_from_a_full_answer(start_server: StartServer) -> None:
    small = start_server(engine={"max_model_len": 64})
    message = create(small, user("LOOP("), max_tokens=1000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert create(small, user("LOOP("), max_tokens=5)["stop_reason"] == "max_tokens"


def test_cached_tokens_are_counted_apart(server: RunningServer) -> None:
    asked = say("counted apart " * 8)
    first, second = (create(server, asked)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] > 16
    assert second["input_tokens"] + second["cache_read_input_tokens"] == first["input_tokens"]
    assert first["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize(
    "said", ["Hello.", f"<think>hm</think>Sure.\n{CALL}\n{CALL} Done.", "", "<think>never ends", "x" * 400]
)
def test_streamed_and_whole_are_the_same(server: RunningServer, said: str) -> None:
    whole = create(server, say(said), tools=[ADD])
    body = {"max_tokens": 300, "messages": [say(said)], "tools": [ADD], "stream": True}
    streamed = replayed(named_events(server.post(PATH, body)))
    for message in (whole, streamed):
        del message["id"]
        message["usage"] = {name: message["usage"][name] for name in ("output_tokens", "output_tokens_details")}
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole


def replayed(received: list[Any]) -> Any:
    """A client's result from the events; checks that blocks are opened and closed one after the other."""
    start, *events, stop = received
    assert (start["type"], stop["type"]) == ("message_start", "message_stop")
    message = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    open_block: dict[str, Any] | None = None
    inputs = ""
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == len(message["content"])
            open_block, inputs = event["content_block"], ""
        elif event["type"] == "content_block_delta":
            assert open_block is not None
            delta = event["delta"]
            (kind,) = delta.keys() - {"type"}
            if kind == "partial_json":
                inputs += delta[kind]
            else:
                open_block[kind] += delta[kind]
        elif event["type"] == "content_block_stop":
            assert open_block is not None
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(inputs)
            message["content"].append(open_block)
            open_block = None
        elif event["type"] == "message_delta":
            message.update(event["delta"], usage=event["usage"])
        else:
            assert event == {"type": "ping"}
    return message


def test_input_that_is_no_json_is_kept_apart(server: RunningServer) -> None:
    said = '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>'
    (call,) = create(server, say(said), tools=[ADD])["content"]
    assert call["input"].keys() == {"INVALID_JSON"}
    assert "oops" in call["input"]["INVALID_JSON"]


def test_a_stream_that_breaks_says_so(server: RunningServer) -> None:
    body = {"max_tokens": 9, "messages": [user("BREAK(")], "stream": True}
    last = named_events(server.post(PATH, body))[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "cannot be turned into text" in last["error"]["message"]


# Conversations.


def test_all_kinds_of_blocks(server: RunningServer) -> None:
    create(
        server,
        user(text("Hi."), {**text("There."), "cache_control": {"type": "ephemeral"}}),
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {**text("One moment."), "citations": None},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}, "caller": {"type": "direct"}},
            {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
        ]},
        user(
            {"type": "tool_result", "tool_use_id": "t1", "content": "2"},
            {"type": "tool_result", "tool_use_id": "t2", "content": [text("no clock")], "is_error": True},
            {"type": "tool_result", "tool_use_id": "t3"},
            text("So?"),
        ),
        {"role": "system", "content": "New rules."},
        user("And?"),
        system=[text("Rules."), text("More.")],
    )  # fmt: skip
    assert prompt_of(server) == (
        '<system>Rules.\nMore.<user>Hi.\nThere.<assistant>One moment.[add {"a": 1}][now {}]'
        "[tool t1]<tool>2[tool t2]<tool>Error: no clock[tool t3]<tool><user>So?"
        "\n<system-reminder>\nNew rules.\n</system-reminder><user>And?<assistant>"
    )


@pytest.mark.parametrize(
    ("turns", "prompt"),
    [
        ([("system", "A."), ("system", "B."), ("user", "Hi.")], "<system>Be brief.\nA.\nB.<user>Hi."),
        ([("user", "Hi."), ("system", "A."), ("system", "B.")], "<system>Be brief.<user>Hi.\n[A.]\n[B.]"),
        ([("user", "Hi."), ("assistant", "Yes?"), ("system", "A."), ("user", "Go.")],
         "<system>Be brief.<user>Hi.<assistant>Yes?<user>[A.]\nGo."),
        ([("user", "Hi."), ("assistant", "Yes?"), ("system", "A."), ("assistant", "So?"), ("user", "Go.")],
         "<system>Be brief.<user>Hi.<assistant>Yes?<user>[A.]<assistant>So?<user>Go."),
        ([("user", "Hi."), ("assistant", "Yes?"), ("system", "A.")],
         "<system>Be brief.<user>Hi.<assistant>Yes?<user>[A.]"),
    ],
)  # fmt: skip
def test_instructions_amid_a_conversation(server: RunningServer, turns: list[tuple[str, str]], prompt: str) -> None:
    create(server, *({"role": role, "content": [text(said)]} for role, said in turns), system="Be brief.")
    shown = prompt_of(server).replace("<system-reminder>\n", "[").replace("\n</system-reminder>", "]")
    assert shown == prompt + "<assistant>"


def test_instructions_alone_come_first(server: RunningServer) -> None:
    create(server, {"role": "system", "content": "A."}, user("Hi."))
    assert prompt_of(server) == "<system>A.<user>Hi.<assistant>"


def test_anthropics_own_tools(server: RunningServer) -> None:
    known = ["bash_20250124", "memory_20250818", "text_editor_20250124", "text_editor_20250728"]
    tools = [{"type": kind, "name": kind.rpartition("_")[0]} for kind in known[:3]]
    tools += [{"type": "web_search_20260318", "name": "web_search"}, {"type": known[3], "name": "edit"}]
    tools += [{"type": "tool_search_tool_bm25", "name": "s"}, {"type": "mcp_toolset", "mcp_server_name": "m"}]
    create(server, user("Hi."), tools=[*tools, {**ADD, "defer_loading": True, "input_examples": [{"a": 1}]}])
    shown = prompt_of(server)
    told = {tool["function"]["name"]: tool["function"] for tool in json.loads(shown[shown.index("[{") :][:-11])}
    assert list(told) == ["bash", "memory", "text_editor", "edit", "add"]
    commands = {name: told[name]["parameters"]["properties"]["command"].get("enum") for name in list(told)[:4]}
    assert commands["edit"] == ["view", "create", "str_replace", "insert"]
    assert commands["text_editor"] == [*commands["edit"], "undo_edit"]
    assert set(commands["memory"]) == {*commands["edit"], "delete", "rename"}
    assert told["add"]["description"] == 'Examples of its input:\n{"a":1}'
    choice = {"type": "tool", "name": "web_search"}
    assert server.post(PATH, {**HI, "tools": [*tools, ADD], "tool_choice": choice}).status_code == 400


def test_what_agents_send_besides_changes_nothing(server: RunningServer) -> None:
    idle = {
        "thread": {"type": "create"}, "safeguards": [{"type": "x"}], "fallbacks": "default",
        "diagnostics": {"previous_message_id": None}, "context_management": {"edits": []},
        "output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 9}},
        "thinking": {"type": "enabled", "display": "updates", "block_binding": {}},
    }  # fmt: skip
    foreign = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        text("One."),
    ]
    image = {"type": "tool_result", "tool_use_id": "t", "content": [IMAGE, text("a page")]}
    message = create(server, user("a"), {"role": "assistant", "content": foreign}, user(image, text("b")), **idle)
    assert text_of(message) == "ok"
    assert "<assistant>One.[tool t]<tool>[An image, which this model cannot see.]\na page<user>b" in prompt_of(server)


def test_a_turn_that_the_client_began_goes_on(server: RunningServer) -> None:
    create(server, user("Count."), {"role": "assistant", "content": "One, "})
    assert prompt_of(server) == "<user>Count.<assistant>One, "


THINKING = (
    "{% for m in messages %}<{{ m.role }}>({{ m.reasoning_content }}){{ m.content }}{% endfor %}"
    "{{ enable_thinking }}{{ reasoning_effort }}"
)


@pytest.fixture(scope="module")
def thinker(start_server: StartServer) -> RunningServer:
    return start_server(engine={"template": THINKING}, reasoning_parser="qwen3")


def test_thinking_is_switched_by_the_template(thinker: RunningServer) -> None:
    cases: list[tuple[dict[str, Any], str, list[str]]] = [
        ({}, "", ["thinking", "text"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}, "True", ["thinking", "text"]),
        ({"thinking": {"type": "adaptive"}}, "True", ["thinking", "text"]),
        ({"thinking": {"type": "disabled"}}, "False", ["text"]),
        ({"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": "some"}}, "some",
         ["thinking", "text"]),
        ({"output_config": {"effort": "low"}}, "Truelow", ["thinking", "text"]),
    ]  # fmt: skip
    for body, expected, kinds in cases:
        message = create(thinker, say("<think>hm</think>Four."), **body)
        assert [block["type"] for block in message["content"]] == kinds
        assert prompt_of(thinker).endswith(")YAS" + expected)


@pytest.mark.parametrize("stream", [True, False])
def test_hidden_thoughts_come_back_in_their_signature(thinker: RunningServer, stream: bool) -> None:
    asked = say("<think>hm</think>Four.")
    body: Any = {"messages": [asked], "max_tokens": 90, "thinking": {"type": "adaptive", "display": "omitted"}}
    response = thinker.post(PATH, {**body, "stream": stream})
    message = replayed(named_events(response)) if stream else response.json()
    thought, said = message["content"]
    assert thought == {"type": "thinking", "thinking": "", "signature": base64.b64encode(b"hm").decode()}
    assert said == text("Four.")
    create(thinker, asked, {"role": "assistant", "content": message["content"]}, user("And?"))
    assert "<assistant>(hm)Four.<user>" in prompt_of(thinker)


def test_tool_choice_reaches_the_chat_path(server: RunningServer) -> None:
    body = {"tools": [ADD], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    message = create(server, say(f"{CALL}{CALL}"), **body)
    assert [block["type"] for block in message["content"]] == ["tool_use"]


def test_sampling(server: RunningServer) -> None:
    create(server, say("hi"), temperature=0.25, top_p=0.5, top_k=7, metadata={"user_id": "u"}, service_tier="auto")
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.25, 0.5, 7, 300)


def test_tokens_are_counted(server: RunningServer) -> None:
    body: Any = {"messages": [say("hi")], "system": "Be brief.", "tools": [ADD]}
    counted = server.post(COUNT, body).json()
    usage = create(server, **body)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert server.post(COUNT, {"messages": [user("a" * 9000)]}).json()["input_tokens"] > 9000


# What is refused.

HI = {"max_tokens": 9, "messages": [user("hi")]}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [user("hi")]}, "max_tokens"),
    ({**HI, "max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 9}, "messages"),
    ({**HI, "messages": []}, "messages"),
    ({**HI, "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({**HI, "messages": [user(IMAGE, text("x"))]}, "messages[0].content[0].type"),
    ({**HI, "messages": [user("a"), {"role": "system", "content": [IMAGE]}]}, "messages[1].content[0]"),
    ({**HI, "messages": [user({"type": "document", "source": {}}, text("x"))]}, "messages[0].content[0].type"),
    ({**HI, "messages": [user({"type": "tool_use", "id": "t", "name": "f", "input": {}}, text("x"))]},
     "messages[0].content[0]"),
    ({**HI, "messages": [user("a"), {"role": "assistant", "content": [
        {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]}, "messages"),
    ({**HI, "messages": [user("a"), {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "", "signature": "?"}]}]}, "messages[1].content[0].signature"),
    ({**HI, "messages": [user("a" * 9000)]}, "messages"),
    ({**HI, "temperature": -1}, "temperature"),
    ({**HI, "stop_sequences": [""]}, "stop_sequences"),
    ({**HI, "tools": [{"name": "computer", "type": "computer_20251124"}]}, "tools[0].type"),
    ({**HI, "tools": [{"type": "bash_20250124"}]}, "tools[0].name"),
    ({**HI, "tools": [{"name": "web", "type": "web_search_20260318"}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({**HI, "thread": {"type": "continue", "previous_message_id": "msg_1"}},
     "capability_rejected: beta_header:message-threads-2026-08-12"),
    ({**HI, "tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({**HI, "tools": [{**ADD, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
    ({**HI, "tool_choice": {"type": "tool", "name": "x"}, "tools": [ADD]}, "tool_choice"),
    ({**HI, "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ({**HI, "thinking": {"type": "between_tools"}}, "thinking.type"),
    ({**HI, "thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
    ({**HI, "thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ({**HI, "speed": "fast"}, "speed"),
    ({**HI, "container": "c"}, "container"),
    ({**HI, "mcp_servers": []}, "mcp_servers"),
    ({**HI, "max_completion_tokens": 4}, "max_completion_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(server: RunningServer, body: Any, param: str) -> None:
    response = server.post(PATH, body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]


def test_every_error_has_anthropics_shape(start_server: StartServer) -> None:
    server = start_server(api_keys=["k"], max_body_bytes=200)
    headers = {"authorization": "Bearer k"}
    cases = [
        (server.post(PATH, HI), 401, "authentication_error"),
        (server.post(PATH, {**HI, "model": "claude"}, headers=headers), 404, "not_found_error"),
        (server.post(f"{PATH}/batches", {}, headers=headers), 404, "not_found_error"),
        (server.http.get(PATH, headers=headers), 405, "invalid_request_error"),
        (server.http.post(PATH, content=b"{" * 300, headers=headers), 413, "request_too_large"),
        (server.http.post(PATH, content=b"{", headers=headers), 400, "invalid_request_error"),
    ]
    for response, status, kind in cases:
        assert response.status_code == status, response.text
        assert error_of(response)["type"] == kind
        assert int(response.headers["content-length"]) == len(response.content)
    assert list(server.post("/v1/chat/completions", {}).json()) == ["error"]


def test_a_failed_engine(start_server: StartServer) -> None:
    server = start_server()
    assert error_of(server.post(PATH, {**HI, "messages": [user("KILL(")]}))["type"] == "api_error"
    response = server.post(PATH, HI)
    assert (response.status_code, error_of(response)["type"]) == (503, "overloaded_error")
