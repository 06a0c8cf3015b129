# ruff: noqa: RUF001 - DeepSeek's tags are spelt with full-width bars
"""Structured output beside tools that the model may call: an answer is calls, or what was asked for, and no third."""

from __future__ import annotations

import functools
import json
from typing import Any

import httpx
import jsonschema
import pytest
from samples import swept
from server.conftest import RunningServer, ServerProcess, StartServer, events

from tidewheel.server.chat.reasoning_formats import REASONING_PARSERS
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
TWO = (("weather", {"city": "Köln", "days": 3}), ("tide", {}))


def written(call: str, parameter: str, around: str = "{}", between: str = "") -> str:
    """Both calls, in a format that has tags for parameters; `call` has places for a name and for parameters."""
    made = (
        call.format(i, name, "".join(parameter.format(key, value) for key, value in values.items()))
        for i, (name, values) in enumerate(TWO)
    )
    return around.format(between.join(made))


def dsml(calls: str, begin: str = "｜DSML｜") -> str:
    text = written(
        f'<{begin}invoke name="{{1}}">\n{{2}}</{begin}invoke>\n',
        f'<{begin}parameter name="{{0}}" string="true">{{1}}</{begin}parameter>\n',
        f"<{begin}{calls}>\n{{}}</{begin}{calls}>",
    )
    return text.replace('days" string="true"', 'days" string="false"')


MARK = "]<]minimax[>["
PYTHON = 'weather(city="Köln", days=3){}tide()'
WRITTEN |= {
    "minimax_m2": written(
        '<invoke name="{1}">\n{2}</invoke>\n',
        '<parameter name="{}">{}</parameter>\n',
        "<minimax:tool_call>\n{}</minimax:tool_call>",
    ),
    "minimax_m3": written(
        f'{MARK}<invoke name="{{1}}">{{2}}{MARK}</invoke>\n',
        f"{MARK}<{{0}}>{{1}}{MARK}</{{0}}>",
        f"{MARK}<tool_call>\n{{}}{MARK}</tool_call>",
    ),
    "step3p5": written(
        "<tool_call>\n<function={1}>\n{2}</function>\n</tool_call>", "<parameter={}>\n{}\n</parameter>\n"
    ),
    "minicpm5": written('<function name="{1}">{2}</function>', '<param name="{}">{}</param>', between="\n"),
    "step3": written(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{1}">\n{2}</steptml:invoke>'
        "<｜tool_call_end｜>\n",
        '<steptml:parameter name="{}">{}</steptml:parameter>\n',
        "<｜tool_calls_begin｜>\n{}<｜tool_calls_end｜>",
    ),
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "deepseek_v41": dsml("calls", "｜DSML｜ "),
    "glm45": written(
        "<tool_call>{1}\n{2}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", between="\n"
    ),
    "hy_v3": written(
        "<tool_call>{1}<tool_sep>\n{2}</tool_call>\n",
        "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
        "<tool_calls>\n{}</tool_calls>",
    ),
    "hy_v4": written(
        "<tool_call>{1}{2}</tool_call>", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "<tool_calls>{}</tool_calls>"
    ),
    "minimax": f"<tool_calls>\n{LISTED[1:-1]}\n</tool_calls>".replace("}}, {", "}}\n{"),
    "solar_open": "<|tool_calls|>"
    f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather<|tool_call:args|>{ARGUMENTS}<|tool_call:end|>"
    "<|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>tide<|tool_call:args|>{}<|tool_call:end|>",
    "muse_glimmer": written(
        ' to={1}<|message|><atem:function_calls>\n<atem:invoke name="{1}">\n{2}</atem:invoke>\n</atem:function_calls>',
        '<atem:parameter name="{}">{}</atem:parameter>\n',
        "<|start|>assistant{}",
        "<|eom|><|start|>assistant",
    ),
    "solar_open2": written(
        "<|tool_call:start|>{1}\n{2}<|tool_call:end|>",
        "<|tool_arg:start|>{}<|tool_arg:value|>{}<|tool_arg:end|>\n",
        between="\n",
    ),
    "kimi_k2": "<|tool_calls_section_begin|>"
    f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
    "<|tool_call_begin|>functions.tide:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": written(
        '<|open|>call tool="{1}" index="{0}"<|sep|>{2}<|close|>call<|sep|>',
        '<|open|>argument key="{}" type="string"<|sep|>{}<|close|>argument<|sep|>',
        "<|open|>tools<|sep|>{}<|close|>tools<|sep|>",
    ).replace('days" type="string"', 'days" type="number"'),
    "gemma4": '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:3}<tool_call|><|tool_call>call:tide{}<tool_call|>',
    "pythonic": f"[{PYTHON.format(', ')}]",
    "llama4_pythonic": f"<|python_start|>[{PYTHON.format(', ')}]<|python_end|>",
    "lfm2": f"<|tool_call_start|>[{PYTHON.format(', ')}]<|tool_call_end|>",
    "olmo3": f"<function_calls>{PYTHON.format(chr(10))}</function_calls>",
    "apertus": f'<|tools_prefix|>[{{"weather": {ARGUMENTS}}}, {{"tide": {{}}}}]<|tools_suffix|>',
    "cohere_command3": "<|START_ACTION|>[\n"
    f'    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {ARGUMENTS}}},\n'
    '    {"tool_call_id": "1", "tool_name": "tide", "parameters": {}}\n]<|END_ACTION|>',
    "inkling": "<|message_model|>weather<|content_invoke_tool_json|>"
    f'{{"name": "weather", "args": {ARGUMENTS}}}<|end_message|>'
    '<|message_model|>tide<|content_invoke_tool_json|>{"name": "tide", "args": {}}<|end_message|>',
    "xlam": LISTED,
    "jamba": f"<tool_calls>{LISTED}</tool_calls>",
}
ALSO = {
    "cohere_command3": "<|START_ACTION|>["
    f'{{"tool_call_id": "0", "tool_name": "weather", "parameters": {ARGUMENTS}}}]<|END_ACTION|>',
    "glm45": "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
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
    reasoning = parser if parser in ("inkling", "muse_glimmer") else "none"  # whose calls have headers
    server: RunningServer = start_server({"specials": tags}, tool_call_parser=parser, reasoning_parser=reasoning)
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
    """The rule begins behind the reasoning, which may hold anything. Streamed and whole answers are the same."""
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


@pytest.mark.parametrize(
    ("name", "thought", "begin", "end"),
    [
        (
            "kimi_k3",
            "<|open|>think<|sep|>{}<|close|>think<|sep|>",
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
        ),
        ("cohere_command3", "<|START_THINKING|>{}<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        ("ernie45", "<think>{}</think>", "<response>", "</response>"),
    ],
)
def test_what_is_asked_for_may_stand_between_the_models_tags(
    start_server: StartServer, name: str, thought: str, begin: str, end: str
) -> None:
    parser = REASONING_PARSERS[name]
    specials = [] if name == "kimi_k3" else [parser.opening, parser.closing]
    server: RunningServer = start_server({"specials": specials}, tool_call_parser=name, reasoning_parser=name)
    thoughts = "" if name == "kimi_k3" else thought.format("hm")  # which only a prompt opens, with several tokens
    for answer in (f'{begin}{{"sky": "grey"}}{end}', '{"sky": "grey"}'):
        for fields in ({}, {"tools": None}):
            message = server.post(CHAT, ask(thoughts + answer, **fields)).json()["choices"][0]["message"]
            assert message["content"] == '{"sky": "grey"}'
    calls = WRITTEN.get(name, WRITTEN["hermes"])
    for before in ("", begin + end):
        message = server.post(CHAT, ask(thoughts + before + calls)).json()["choices"][0]["message"]
        assert ([call for call, _ in calls_in(message)], message["content"]) == (["weather", "tide"], None)
    demanded = f'{begin}[{{"name": "tide", "parameters": {{}}}}]{end}'
    message = server.post(CHAT, ask(thoughts + demanded, tool_choice="required")).json()["choices"][0]["message"]
    assert calls_in(message) == [("tide", {})]


def test_texts_and_names_are_written_as_python_does_too(start_server: StartServer) -> None:
    server: RunningServer = start_server(tool_call_parser="lfm2")
    properties = {"note": {"type": "string"}, "exact": {"type": "boolean"}, "unit": {"enum": ["C", None]}}
    function = {"name": "weather", "parameters": {"properties": properties, "required": ["note"]}}
    tools = [{"type": "function", "function": function}]
    for written, made in (
        ("note='it\\'s', exact=True", {"note": "it's", "exact": True}),
        ('note="it\'s", unit=null, exact=false', {"note": "it's", "unit": None, "exact": False}),
    ):
        said = f"<|tool_call_start|>[weather({written})]<|tool_call_end|>"
        (choice,) = server.post(CHAT, ask(said, tools=tools)).json()["choices"]
        assert calls_in(choice["message"]) == [("weather", made)]
    for wrong in ("exact=True", "note='a', exact='b'", "note='a', unit='C'", "note='\\x'"):
        said = f"<|tool_call_start|>[weather({wrong})]<|tool_call_end|>"
        assert server.post(CHAT, ask(said, tools=tools)).status_code == 500


def test_nested_arguments_are_written_as_the_format_nests_them(start_server: StartServer) -> None:
    place = {"type": "object", "properties": {"name": {"type": "string"}, "km": {"type": "number"}}}
    properties = {
        "near": {"type": "array", "items": place, "minItems": 1},
        "any": {},
        "text": {"type": ["string", "integer"]},
        "self": {"$ref": "#"},
        "TYPE": {"const": "KEY"},
        "deep": functools.reduce(lambda part, _: {"type": "array", "items": part}, range(20), {"type": "string"}),
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    for parser, said, made in (
        ("gemma4", '<|tool_call>call:f{near:[{name:<|"|>a<|"|>,km:1.5},{km:2}],any:{"a": [1]},text:7}<tool_call|>',
         {"near": [{"name": "a", "km": 1.5}, {"km": 2}], "any": {"a": [1]}, "text": 7}),
        ("minimax_m3", f"{MARK}<tool_call>\n{MARK}<invoke name=\"f\">{MARK}<near>{MARK}<item>{MARK}<name>a{MARK}</name>"
         f"{MARK}</item>{MARK}</near>{MARK}<text>7{MARK}</text>{MARK}</invoke>\n{MARK}</tool_call>",
         {"near": [{"name": "a"}], "text": "7"}),
        ("deepseek_v32", dsml("function_calls").split("<｜DSML｜invoke")[0]
         + '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="text" string="false">7</｜DSML｜parameter>\n'
         '<｜DSML｜parameter name="self" string="false">{"any": 1}</｜DSML｜parameter>\n'
         '<｜DSML｜parameter name="TYPE" string="true">KEY</｜DSML｜parameter>\n'
         "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
         {"text": 7, "self": {"any": 1}, "TYPE": "KEY"}),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
         '<|open|>argument key="any" type="array"<|sep|>[1]<|close|>argument<|sep|>'
         '<|open|>argument key="text" type="number"<|sep|>7<|close|>argument<|sep|>'
         '<|open|>argument key="TYPE" type="string"<|sep|>KEY<|close|>argument<|sep|>'
         "<|close|>call<|sep|><|close|>tools<|sep|>", {"any": [1], "text": 7, "TYPE": "KEY"}),
    ):  # fmt: skip
        server: RunningServer = start_server(tool_call_parser=parser)
        (choice,) = server.post(CHAT, ask(said, tools=tools)).json()["choices"]
        assert calls_in(choice["message"]) == [("f", made)]
        wrong = ask(said.replace("KEY", "QUAY").replace("km:2", "kg:2").replace("<name>", "<nick>"), tools=tools)
        assert parser == "minimax_m3" or server.post(CHAT, wrong).status_code == 500


def test_arguments_without_names_are_refused_where_tags_have_them(start_server: StartServer) -> None:
    server: RunningServer = start_server(tool_call_parser="glm45")

    def function(parameters: dict[str, Any]) -> list[Any]:
        return [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": parameters}}]

    node = {"type": "object", "properties": {"text": {"type": "string"}, "next": {"$ref": "#/$defs/node"}}}
    said = "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n"
    said += '<arg_key>next</arg_key>\n<arg_value>{"text": "b"}</arg_value>\n</tool_call>'
    recursive = function({"$ref": "#/$defs/node", "$defs": {"node": node}})
    (choice,) = server.post(CHAT, ask(said, tools=recursive)).json()["choices"]
    assert [name for name, _ in calls_in(choice["message"])] == ["f"]
    for parameters in ({"additionalProperties": {"type": "string"}}, {"$ref": "#/$defs/none"}):
        response = server.post(CHAT, ask("x", tools=function(parameters)))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tools[1].function.parameters"), error
        assert server.post(CHAT, ask("x", tools=function(parameters), response_format=None)).status_code == 200
