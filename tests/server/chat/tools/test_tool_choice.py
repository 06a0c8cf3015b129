"""`tool_choice`: what is offered, what an answer that has to be a call must look like, and how it is read."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest
from samples import swept
from server.conftest import RunningServer, StartServer, events, named_events

from tidewheel.server.chat.pieces import CallArguments, CallStart, Turn
from tidewheel.server.chat.tools import TOOL_CALL_PARSERS
from tidewheel.server.chat.tools.schema import arguments_schema
from tidewheel.server.chat.tools.tool_choice import (
    RequestTools,
    calls_in_format,
    demanded_calls_parser,
    demanded_calls_schema,
    request_tools,
)
from tidewheel.server.errors import ApiError
from tidewheel.server.protocol.chat import ChatCompletionRequest, Tool, ToolFunction

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


def tools(**fields: Any) -> RequestTools:
    return request_tools(body(**fields))


def names(request: ChatCompletionRequest) -> list[str]:
    return [tool.function.name for tool in request_tools(request).offered]


def allowed(mode: str, *tools: str) -> dict[str, Any]:
    listed = [{"type": "function", "function": {"name": name}} for name in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


def test_what_is_offered() -> None:
    assert names(body()) == names(body(tool_choice="auto")) == names(body(tool_choice="required")) == ["tree", "now"]
    assert names(body(tool_choice="none")) == names(body(tools=None)) == []
    assert names(body(tool_choice=allowed("auto", "now"))) == ["now"]
    assert names(body(tool_choice=NOW)) == ["tree", "now"]


def lines_run(count: int) -> int:
    """How many lines of Python it takes to find that many tools, all of them allowed, each by its name."""
    listed = [f"f{i}" for i in range(count)]
    many = [{"type": "function", "function": {"name": name}} for name in listed]
    request = body(tools=many, tool_choice=allowed("auto", *reversed(listed)))
    counted = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal counted
        counted += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found, calls = names(request), calls_in_format(request_tools(request), TOOL_CALL_PARSERS["hermes"])
    finally:
        sys.settrace(before)
    assert found == listed
    assert len(calls.arguments) == len(listed)
    return counted


def test_many_tools_are_looked_through_in_linear_time() -> None:
    """If each name were looked for among all tools, twice as many would take four times as long."""
    assert lines_run(600) < 3 * lines_run(300)


def test_only_demanded_calls_have_a_schema() -> None:
    for choice in (None, "auto", "none", allowed("auto", "now")):
        assert demanded_calls_schema(tools(tool_choice=choice)) is None


def test_a_named_function_is_its_arguments() -> None:
    assert demanded_calls_schema(tools(tool_choice=NOW)) == {"type": "object", "additionalProperties": False}
    named = {"type": "function", "function": {"name": "tree"}}
    assert demanded_calls_schema(tools(tool_choice=named)) == NODE


@pytest.mark.parametrize(
    ("parameters", "is_empty"),
    [
        (None, True),
        ({}, True),
        ({"type": "object"}, True),
        ({"type": "object", "properties": {}, "required": [], "description": "nothing"}, True),
        ({"properties": {"a": {}}}, False),
        ({"properties": {}, "additionalProperties": True}, False),
        ({"patternProperties": {"^a": {}}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {}}}}}, False),
        ({"anyOf": [{"properties": {"a": {}}}]}, False),
        ({"required": ["a"]}, False),
    ],
)
def test_a_function_that_speaks_of_no_argument_takes_none(parameters: dict[str, Any] | None, is_empty: bool) -> None:
    schema = arguments_schema(Tool("function", ToolFunction("f", parameters=parameters)))
    assert schema == {"type": "object", **(parameters or {}), **({"additionalProperties": False} if is_empty else {})}


def test_required_is_a_list_of_calls() -> None:
    schema = demanded_calls_schema(tools(tool_choice="required"))
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
    single = demanded_calls_schema(tools(tool_choice="required", parallel_tool_calls=False))
    assert single is not None
    assert single["maxItems"] == 1
    some = demanded_calls_schema(tools(tool_choice=allowed("required", "now")))
    assert some is not None
    assert len(some["items"]["anyOf"]) == 1


def test_answers_are_read_as_they_come() -> None:
    parser = demanded_calls_parser(tools(tool_choice=NOW))
    pieces = [parser.feed(text) for text in ("\n", '{"a"', ": 1}", " ")]
    assert pieces[0] == []
    (start, *rest), *later = pieces[1:]
    assert isinstance(start, CallStart)
    assert start.name == "now"
    assert (rest, later, parser.finish()) == ([CallArguments(0, '{"a"')], [[CallArguments(0, ": 1}")], []], [])
    assert demanded_calls_parser(tools(tool_choice=NOW)).finish() == []


def test_lists_of_calls_are_read_at_every_cut() -> None:
    made = [("tree", {"left": {"name": "[]"}}), ("now", {})]
    text = json.dumps([{"name": name, "parameters": parameters} for name, parameters in made])
    for cut in range(len(text)):
        parser = demanded_calls_parser(tools(tool_choice="required"))
        turn = Turn.of(parser.feed(text[:cut]) + parser.feed(text[cut:]) + parser.finish())
        assert turn.content == ""
        assert [(call.name, json.loads(call.arguments)) for call in turn.calls] == made
        cut_off = demanded_calls_parser(tools(tool_choice="required"))
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
        tools(**fields)
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


def chat_parts(server: RunningServer, ask: dict[str, Any], stream: bool) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and why it ended."""
    response = server.post(PATH, {**ask, "stream": stream})
    if not stream:
        (choice,) = response.json()["choices"]
        calls = [call["function"] for call in choice["message"].get("tool_calls") or []]
        made = [(call["name"], call["arguments"]) for call in calls]
        return choice["message"]["content"] or "", made, choice["finish_reason"]
    choices = [chunk["choices"][0] for chunk in events(response)]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls") or []]
    made = [("", "")] * (max((call["index"] for call in calls), default=-1) + 1)
    for call in calls:
        name, arguments = made[call["index"]]
        made[call["index"]] = (name + (call["function"].get("name") or ""), arguments + call["function"]["arguments"])
    return "".join(c["delta"].get("content") or "" for c in choices), made, choices[-1]["finish_reason"]


LISTED = '[{"name": "tree", "parameters": {"name": "oak"}}, {"name": "now", "parameters": {}}]'


@pytest.fixture(scope="module")
def thinking_server(start_server: StartServer) -> RunningServer:
    """Its tokens are bytes, besides the tags around its thoughts."""
    return start_server({"specials": ["<think>", "</think>"]}, tool_call_parser="hermes", reasoning_parser="qwen3")


@pytest.mark.parametrize("thinks", [swept(False), True])
@pytest.mark.parametrize(
    ("length", "calls"),
    [
        (1, []),
        (len('[{"name": "tree'), []),
        (len('[{"name": "tree"'), [("tree", "")]),
        (len('[{"name": "tree", "par'), [("tree", "")]),
        (len('[{"name": "tree", "parameters": {"na'), [("tree", '{"na')]),
        (LISTED.index("}") + 1, [("tree", '{"name": "oak"}')]),
        (LISTED.index("now"), [("tree", '{"name": "oak"}')]),
        (LISTED.index("now") + 4, [("tree", '{"name": "oak"}'), ("now", "")]),
        (len(LISTED) - 1, [("tree", '{"name": "oak"}'), ("now", "{}")]),
    ],
)
def test_a_demanded_call_that_is_cut_off_leaves_no_frame(
    thinking_server: RunningServer, length: int, calls: list[tuple[str, str]], thinks: bool
) -> None:
    """A call comes as far as it came, once its name is complete; nothing comes as text."""
    pytest.importorskip("llguidance")
    thought = "<think>hm</think>" if thinks else ""
    message = {"role": "user", "content": f"SAY({thought}{LISTED})YAS"}
    most = length + (len("[hm]") if thinks else 0)
    ask = {"messages": [message], "tools": TOOLS, "tool_choice": "required", "max_tokens": most}
    for stream in (False, True):
        assert chat_parts(thinking_server, ask, stream) == ("", calls, "length")
    function_tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    body = {"input": message["content"], "tools": function_tools, "tool_choice": "required", "max_output_tokens": most}
    response = thinking_server.post("/v1/responses", body).json()
    assert response["status"] == "incomplete"
    items = [item for item in response["output"] if item["type"] != "reasoning"]
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    assert "".join(texts) == ""
    assert [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"] == calls
    streamed = named_events(thinking_server.post("/v1/responses", {**body, "stream": True}))
    assert not [event for event in streamed if event["type"] == "response.output_text.delta"]
    anthropic_tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {"type": "object"})}  # type: ignore[index]
        for tool in TOOLS
    ]
    body = {"messages": [message], "tools": anthropic_tools, "tool_choice": {"type": "any"}, "max_tokens": most}
    answer = thinking_server.post("/v1/messages", body).json()
    blocks = [block for block in answer["content"] if block["type"] != "thinking"]
    assert [(block["type"], block["name"]) for block in blocks] == [("tool_use", name) for name, _ in calls]
    assert answer["stop_reason"] == "max_tokens"
    streamed = named_events(thinking_server.post("/v1/messages", {**body, "stream": True}))
    assert not [event for event in streamed if event.get("delta", {}).get("type") == "text_delta"]


def test_a_named_function_that_is_cut_off_has_the_arguments_so_far(thinking_server: RunningServer) -> None:
    pytest.importorskip("llguidance")
    named = {"type": "function", "function": {"name": "tree"}}
    message = {"role": "user", "content": 'SAY(<think>hm</think>{"name": "oak"})YAS'}
    for most, calls in ((3, []), (len("[hm]") + 5, [("tree", '{"nam')])):
        ask = {"messages": [message], "tools": TOOLS, "tool_choice": named, "max_tokens": most}
        for stream in (False, True):
            assert chat_parts(thinking_server, ask, stream) == ("", calls, "length")


def test_a_chosen_call_that_is_cut_off_leaves_no_frame(thinking_server: RunningServer) -> None:
    call = '<tool_call>\n{"name": "tree", "arguments": {"name": "oak"}}\n</tool_call>'
    for said, most, expected in (
        (call, len('<tool_call>\n{"name": "tr'), ("", [])),
        (call, len('<tool_call>\n{"name": "tree", "arg'), ("", [("tree", "")])),
        (call, len(call) - 3, ("", [("tree", '{"name": "oak"}')])),
        (f"So: {call}", len("So: <tool_call>"), ("So:", [])),
        ("1 <tool_call> 2", 40, ("1 <tool_call> 2", [])),
        ("1 < 2", 3, ("1 <", [])),
    ):
        ask = {"messages": [{"role": "user", "content": f"SAY({said})YAS"}], "tools": TOOLS, "max_tokens": most}
        for stream in (False, True):
            assert chat_parts(thinking_server, ask, stream)[:2] == expected


def test_ids_of_demanded_calls_are_those_of_the_models_format(start_server: StartServer) -> None:
    pytest.importorskip("llguidance")
    server: RunningServer = start_server(tool_call_parser="mistral")
    for choice, said in (("required", '[{"name": "now", "parameters": {}}]'), (NOW, "{}")):
        message = {"role": "user", "content": f"SAY({said})YAS"}
        answer = server.post(PATH, {"messages": [message], "tools": TOOLS, "tool_choice": choice}).json()
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert len(call["id"]) == 9  # their templates refuse others


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
