"""`tool_choice`: what is offered, what an answer that has to be a call must look like, and how it is read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from server.conftest import RunningServer, StartServer

from tidewheel.server.chat.pieces import CallArguments, CallStart, Turn
from tidewheel.server.chat.tools.choice import demanded_calls_parser, demanded_calls_schema, offered_tools
from tidewheel.server.errors import ApiError
from tidewheel.server.protocol.chat import ChatCompletionRequest

PATH = "/v1/chat/completions"
NODE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "name": {"$ref": "#/$defs/name"}, "kind": {"const": {"$ref": "#"}}},
    "$defs": {"name": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "tree", "parameters": NODE}},
    {"type": "function", "function": {"name": "now"}},
]
NOW = {"type": "function", "function": {"name": "now"}}


def body(**fields: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "hi"}]
    return msgspec.convert({"messages": messages, "tools": TOOLS, **fields}, ChatCompletionRequest)


def names(request: ChatCompletionRequest) -> list[str]:
    return [tool.function.name for tool in offered_tools(request)]


def allowed(mode: str, *tools: str) -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name}} for name in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


def test_what_is_offered() -> None:
    assert names(body()) == names(body(tool_choice="auto")) == names(body(tool_choice="required")) == ["tree", "now"]
    assert names(body(tool_choice="none")) == names(body(tools=None)) == []
    assert names(body(tool_choice=allowed("auto", "now"))) == ["now"]
    assert names(body(tool_choice=NOW)) == ["tree", "now"]


def test_only_demanded_calls_have_a_schema() -> None:
    for choice in (None, "auto", "none", allowed("auto", "now")):
        assert demanded_calls_schema(body(tool_choice=choice)) is None


def test_a_named_function_is_its_arguments() -> None:
    assert demanded_calls_schema(body(tool_choice=NOW)) == {"type": "object", "additionalProperties": False}
    named = {"type": "function", "function": {"name": "tree"}}
    assert demanded_calls_schema(body(tool_choice=named)) == NODE


def test_required_is_a_list_of_calls() -> None:
    schema = demanded_calls_schema(body(tool_choice="required"))
    assert schema is not None
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert schema["maxItems"] == 32
    tree, now = schema["items"]["anyOf"]
    assert tree["properties"] == {"name": {"const": "tree"}, "parameters": {"$ref": "#/$defs/0"}}
    assert list(tree["properties"]) == tree["required"]
    assert now["properties"]["name"] == {"const": "now"}
    moved = schema["$defs"]["0"]
    assert moved["properties"]["left"] == {"$ref": "#/$defs/0"}
    assert moved["properties"]["name"] == {"$ref": "#/$defs/0/$defs/name"}
    assert moved["properties"]["kind"] == NODE["properties"]["kind"]  # type: ignore[index]
    single = demanded_calls_schema(body(tool_choice="required", parallel_tool_calls=False))
    assert single is not None
    assert single["maxItems"] == 1
    some = demanded_calls_schema(body(tool_choice=allowed("required", "now")))
    assert some is not None
    assert len(some["items"]["anyOf"]) == 1


def test_answers_are_read_as_they_come() -> None:
    parser = demanded_calls_parser(body(tool_choice=NOW))
    pieces = [parser.feed(text) for text in ("\n", '{"a"', ": 1}", " ")]
    assert pieces[0] == []
    (start, *rest), *later = pieces[1:]
    assert isinstance(start, CallStart)
    assert start.name == "now"
    assert (rest, later, parser.finish()) == ([CallArguments(0, '{"a"')], [[CallArguments(0, ": 1}")], []], [])
    assert demanded_calls_parser(body(tool_choice=NOW)).finish() == []


def test_lists_of_calls_are_read_at_every_cut() -> None:
    made = [("tree", {"left": {"name": "[]"}}), ("now", {})]
    text = json.dumps([{"name": name, "parameters": parameters} for name, parameters in made])
    for cut in range(len(text)):
        parser = demanded_calls_parser(body(tool_choice="required"))
        turn = Turn.of(parser.feed(text[:cut]) + parser.feed(text[cut:]) + parser.finish())
        assert turn.content == ""
        assert [(call.name, json.loads(call.arguments)) for call in turn.calls] == made
        cut_off = demanded_calls_parser(body(tool_choice="required"))
        turn = Turn.of(cut_off.feed(text[:cut]) + cut_off.finish(cut_off=True))
        assert turn.content == ""
        assert [call.name for call in turn.calls] == [name for name, _ in made if f'"name": "{name}"' in text[:cut]]
        assert all(call.arguments in text for call in turn.calls)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tool_choice": allowed("auto", "other")},
        {"tool_choice": {"type": "custom", "custom": {"name": "x"}}},
        {"tools": None, "tool_choice": "required"},
        {"tools": [], "tool_choice": NOW},
    ],
)
def test_a_choice_that_does_not_fit_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refusal:
        demanded_calls_schema(body(**fields))
    assert refusal.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("choice", "text", "finish_reason"),
    [
        ("required", '[{"name": "now", "parameters": {}}, {"name": "tree", "parameters": {"name": "oak"}}]',
         "tool_calls"),
        ({"type": "function", "function": {"name": "tree"}}, '{"name": "oak"}', "stop"),
    ],
)  # fmt: skip
def test_demanded_calls_are_answered(start_server: StartServer, choice: Any, text: str, finish_reason: str) -> None:
    pytest.importorskip("llguidance")
    server: RunningServer = start_server(
        {"specials": ["<think>", "</think>"]}, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    for single in (None, False):
        if single is False and choice == "required":
            text = '[{"name": "now", "parameters": {}}]'
        message = {"role": "user", "content": f"SAY(<think>hm</think>{text})YAS"}
        request = {"messages": [message], "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": single}
        (answer,) = server.post(PATH, request).json()["choices"]
        assert answer["finish_reason"] == finish_reason
        assert (answer["message"]["content"], answer["message"]["reasoning"]) == (None, "hm")
        calls = [call["function"] for call in answer["message"]["tool_calls"]]
        assert calls[-1]["name"] == ("now" if single is False and choice == "required" else "tree")
        assert json.loads(calls[-1]["arguments"]) == ({} if calls[-1]["name"] == "now" else {"name": "oak"})


def test_only_allowed_tools_reach_the_template(start_server: StartServer) -> None:
    server: RunningServer = start_server(tool_call_parser="hermes")
    request = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": allowed("auto", "now")}
    assert server.post(PATH, request).status_code == 200
    prompt = server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids))
    assert '"now"' in prompt
    assert '"tree"' not in prompt


def test_an_unknown_choice_is_refused(start_server: StartServer) -> None:
    server: RunningServer = start_server()
    for choice in ("sometimes", {"type": "perhaps"}, {"type": "function"}, 3):
        request = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": choice}
        response = server.post(PATH, request)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("tool_choice")


def test_a_demand_that_cannot_be_compiled_is_refused(start_server: StartServer) -> None:
    pytest.importorskip("llguidance")
    server: RunningServer = start_server()
    tool = {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"a": {"type": "objekt"}}}}}
    request = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "tool_choice": "required"}
    response = server.post(PATH, request)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert "objekt (at /$defs/0/properties/a)" in response.json()["error"]["message"]


def test_a_beam_search_refuses_to_demand_calls(start_server: StartServer) -> None:
    server: RunningServer = start_server()
    request = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "use_beam_search": True}
    response = server.post(PATH, {**request, "tool_choice": "required"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tool_choice"
