# ruff: noqa: RUF001 - DeepSeek's tags are spelt with full-width bars
"""Structured output beside tools that the model may call: an answer is calls, or what was asked for, and no third."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest
from samples import swept
from server.conftest import RunningServer, ServerProcess, StartServer, events

from tidewheel.server.chat.tools import TOOL_CALL_PARSERS

pytest.importorskip("llguidance")  # not there on every machine

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}, "required": ["sky"],
          "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "tide", "parameters": {"properties": {}, "additionalProperties": False}}},
]
ARGUMENTS = '{"city": "Köln", "days": 3}'
LISTED = f'[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "tide", "arguments": {{}}}}]'
ONE = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
WRITTEN = {
    "hermes": f'<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{{"name": "tide", "arguments": {{}}}}\n</tool_call>',
    "granite": f"<|tool_call|>{LISTED}",
    "phi4_mini_json": f"functools{LISTED}",
    "llama3_json": f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "tide", "parameters": {{}}}}',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]tide[ARGS]{{}}",
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>tide\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>tide<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "qwen3_coder": "<tool_call>\n<function=weather>\n"
    "<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=tide>\n</function>\n</tool_call>",
}
ALSO = {
    "granite": f"<tool_call>[{ONE}]",
    "phi4_mini_json": f"<|tool_call|>[{ONE}]<|/tool_call|>",
    "llama3_json": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f"[TOOL_CALLS] [{ONE}]",
}


def ask(said: str, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"SAY({said})YAS"}
    return {"messages": [message], "tools": TOOLS, "response_format": FORMAT, **fields}


def calls_in(message: dict[str, Any]) -> list[tuple[str, Any]]:
    made = [call["function"] for call in message.get("tool_calls") or []]
    return [(call["name"], json.loads(call["arguments"])) for call in made]


BOTH_WAYS = ("hermes", "qwen3_coder")
SPELT_OUT = ("granite", "llama3_json", "deepseek_v31")


@pytest.mark.parametrize(
    ("parser", "special"),
    [
        pytest.param(
            parser, special, marks=() if parser in BOTH_WAYS or special != (parser in SPELT_OUT) else pytest.mark.sweep
        )
        for parser in WRITTEN
        for special in (True, False)
    ],
)
def test_every_format_of_calls_is_let_through(start_server: StartServer, parser: str, special: bool) -> None:
    """Whether its tags are special tokens of the vocabulary or spelt out."""
    tags = list(TOOL_CALL_PARSERS[parser].markers) if special else []
    server: RunningServer = start_server({"specials": tags}, tool_call_parser=parser)
    weather = ("weather", json.loads(ARGUMENTS))
    (choice,) = server.post(CHAT, ask(WRITTEN[parser])).json()["choices"]
    assert calls_in(choice["message"]) == [weather, ("tide", {})]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    if parser in ALSO:
        (choice,) = server.post(CHAT, ask(ALSO[parser])).json()["choices"]
        assert calls_in(choice["message"]) == [weather]
    (choice,) = server.post(CHAT, ask('{"sky": "grey"}')).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"sky": "grey"}', "stop")
    assert not choice["message"].get("tool_calls")
    # A device that writes a third thing is one that does not keep to the grammar.
    (choice,) = server.post(CHAT, ask('{\n  "sky": "grey"\n}')).json()["choices"]
    assert choice["message"]["content"] == '{\n  "sky": "grey"\n}'
    for said in ("Hello", WRITTEN[parser].replace("weather", "wether"), WRITTEN[parser].replace("days", "hours")):
        assert server.post(CHAT, ask(said)).status_code == 500
    # With one call the answer is complete, unless the format has a list to close.
    single = server.post(CHAT, ask(WRITTEN[parser], parallel_tool_calls=False))
    assert single.status_code == 500 or calls_in(single.json()["choices"][0]["message"]) == [weather]


def test_streams_and_reasoning(start_server: StartServer) -> None:
    """The rule begins behind the reasoning, which may hold anything; what was streamed is what is whole."""
    server: RunningServer = start_server(
        {"specials": ["<think>", "</think>"]}, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    for rest, content, calls in (
        (WRITTEN["hermes"], None, 2),
        ('{"sky":"blue"}', '{"sky":"blue"}', 0),
    ):
        body = ask(f"<think>a <tool_call> or {{}}?</think>{rest}")
        message = server.post(CHAT, body).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "a <tool_call> or {}?"
        assert (message["content"], len(calls_in(message))) == (content, calls)
        deltas = [chunk["choices"][0]["delta"] for chunk in events(server.post(CHAT, {**body, "stream": True}))]
        assert "".join(delta.get("content") or "" for delta in deltas) == (content or "")
        arguments = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls") or ()]
        assert "".join(arguments) == "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "json_object"}}, '{"any": [1]}'),
        ({"response_format": None, "guided_choice": ["ebb", "flood"]}, "flood"),
        swept({"response_format": None, "guided_regex": "[a-z ]+"}, "low tide"),
        swept({"response_format": None, "guided_grammar": 'root ::= "ebb" | "flood"'}, "ebb"),
        swept({"response_format": None, "structured_outputs": {"json": SCHEMA}}, '{"sky":"blue"}'),
        ({"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "tide"}}}, "tide"),
    ],
    ids=str,
)
def test_every_way_to_ask_leaves_room_for_calls(start_server: StartServer, fields: dict[str, Any], said: str) -> None:
    server: RunningServer = start_server(tool_call_parser="hermes")
    assert server.post(CHAT, ask(said, **fields)).json()["choices"][0]["message"]["content"] == said
    assert len(calls_in(server.post(CHAT, ask(WRITTEN["hermes"], **fields)).json()["choices"][0]["message"])) == 2
    for none in ({"tool_choice": "none"}, {"tools": None}):
        assert server.post(CHAT, ask(WRITTEN["hermes"], **{**fields, **none})).status_code == 500


def test_the_embedded_model_does_one_or_the_other(demo_server: ServerProcess) -> None:
    seen = set()
    question = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
    sampling = {"n": 8, "seed": 4, "max_tokens": 120, "temperature": 1.2}
    for fields in ({}, {"parallel_tool_calls": False}):
        body = {**question, **sampling, **fields, "tools": TOOLS, "response_format": FORMAT}
        response = httpx.post(demo_server.url + CHAT, json=body, timeout=60, trust_env=False)
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            if choice["finish_reason"] == "length":
                continue
            calls = calls_in(choice["message"])
            assert len(calls) <= (1 if fields else 32)
            for name, arguments in calls:
                jsonschema.validate(arguments, WEATHER if name == "weather" else {"maxProperties": 0})
            if not calls:
                jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
            seen.add(bool(calls))
    assert seen


@pytest.mark.parametrize("parser", ["pythonic", "llama4_pythonic"])
def test_a_format_that_no_grammar_describes_is_refused_saying_what_to_do(
    start_server: StartServer, parser: str
) -> None:
    server: RunningServer = start_server(tool_call_parser=parser)
    for stream in (False, True):
        response = server.post(CHAT, ask("[]", stream=stream))
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("response_format.json_schema.schema", "unsupported_parameter")
        assert 'tool_choice to "none", "required" or a function' in error["message"]
    for fields in ({"tool_choice": "none"}, {"tools": None}):
        assert server.post(CHAT, ask('{"sky":"blue"}', **fields)).status_code == 200
    assert server.post(CHAT, ask("ok", response_format=None)).status_code == 200


def test_the_schema_at_fault_is_named(start_server: StartServer) -> None:
    server: RunningServer = start_server(tool_call_parser="hermes")
    odd = {"properties": {"a": {"type": "objekt"}}}
    tools: list[Any] = [TOOLS[0], {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    error = server.post(CHAT, ask("x", tools=tools)).json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert "objekt (at /properties/a)" in error["message"]
    wrong = {"type": "json_schema", "json_schema": {"name": "answer", "schema": odd}}
    error = server.post(CHAT, ask("x", response_format=wrong)).json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert "objekt (at /properties/a)" in error["message"]


def test_demanded_calls_have_no_room_for_whitespace_and_an_end(start_server: StartServer) -> None:
    server: RunningServer = start_server(tool_call_parser="hermes")
    one = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
    for said, status in (
        (f"[{one}]", 200),
        (f"[{one.replace(': ', ':').replace(', ', ',')}]", 200),
        (f"[ {one}]", 500),
        (f"[{one}\n]", 500),
        (f"[{one.replace(': ', ':  ')}]", 500),
        (f"[{', '.join([one] * 32)}]", 200),
        (f"[{', '.join([one] * 33)}]", 500),
    ):
        assert server.post(CHAT, ask(said, tool_choice="required")).status_code == status, said
    assert (
        server.post(CHAT, ask(f"[{one}, {one}]", tool_choice="required", parallel_tool_calls=False)).status_code == 500
    )
