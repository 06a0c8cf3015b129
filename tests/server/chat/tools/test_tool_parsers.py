# ruff: noqa: RUF001 - DeepSeek's tags are spelt with full-width bars
"""Tool parsers: the same pieces, however the text is cut; text that is no call comes out as it went in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.scripted_engine import ByteBackend

from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.server.chat.parser_names import TOOL_CALL_PARSER_NAMES
from tidewheel.server.chat.pieces import CallArguments, CallStart, Piece, Turn
from tidewheel.server.chat.tools import TOOL_CALL_PARSERS
from tidewheel.server.chat.tools.json_scanner import is_json
from tidewheel.server.protocol.chat import Tool, ToolFunction

Parsed = tuple[str, list[tuple[str, str]]]

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "tags": {"$ref": "#/$defs/tags"},
    "where": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    "note": {"type": ["string", "null"]},
    "unit": {"enum": ["C", "F"]},
    "level": {"enum": [1, 2]},
    "free": {},
    "near": {
        "type": "array",
        "items": {"type": "object", "properties": {"name": {"type": "string"}, "km": {"type": "number"}}},
    },
}
TOOLS = [
    Tool(
        "function",
        ToolFunction("weather", parameters={"properties": PROPERTIES, "$defs": {"tags": {"type": "array"}}}),
    ),
    *(Tool("function", ToolFunction(name)) for name in ("f", "g", "h")),
]
NAMES = sorted(TOOL_CALL_PARSERS)
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=10)


def pieces_of(name: str, *texts: str) -> list[list[Piece]]:
    parser = TOOL_CALL_PARSERS[name](TOOLS)
    return [*(parser.feed(text) for text in texts), parser.finish()]


def parse(name: str, *texts: str) -> Parsed:
    turn = Turn.of(piece for pieces in pieces_of(name, *texts) for piece in pieces)
    return turn.content, [(call.name, call.arguments) for call in turn.calls]


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "</tool_call>", "ü 🌊"]}}\n</tool_call>'
ADD = ("add", '{"a": [1, "</tool_call>", "ü 🌊"]}')
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n5\n</parameter>\n"
    "</function>\n</tool_call>"
)
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V3_CALL = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
V31_CALL = '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'

GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>5</arg_value>\n</tool_call>"
)
WEATHER = ("weather", '{"city": "Paris", "days": 5}')
M2 = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">5</parameter>\n</invoke>\n</minimax:tool_call>'
)
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
)
STEP3 = (
    "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="weather">\n<steptml:parameter name="city">Paris</steptml:parameter>\n'
    '<steptml:parameter name="days">5</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>'
)
HY = (
    "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n</tool_calls>"
)
SOLAR = (
    "<|tool_call:start|>weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:end|>\n"
    "<|tool_arg:start|>days<|tool_arg:value|>5<|tool_arg:end|>\n<|tool_call:end|>"
)
K3 = (
    '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>5<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)
MARK = "]<]minimax[>["
M3 = "".join(
    MARK + tag
    for tag in (
        "<tool_call>\n", '<invoke name="weather">', "<city>Paris", "</city>", "<days>5", "</days>", "</invoke>\n",
        "</tool_call>",
    )
)  # fmt: skip
GEMMA = '<|tool_call>call:weather{city:<|"|>Pa{r, i]s<|"|>,days:5,tags:[1,<|"|>b<|"|>,{c:true}]}<tool_call|>'

CASES: list[tuple[str, str, Parsed]] = [
    ("glm45", f"Sure.\n{GLM}\n{GLM}", ("Sure.", [WEATHER, WEATHER])),
    ("glm45", GLM.replace("\n", ""), ("", [WEATHER])),
    ("glm45", "<tool_call>other</tool_call>\n<tool_call>other\n</tool_call>", ("", [("other", "{}")] * 2)),
    ("glm45", GLM.replace("Paris", "\n a<b </arg_valu "),
     ("", [("weather", '{"city": "\\n a<b </arg_valu ", "days": 5}')])),
    ("glm45", GLM.replace("Paris", "a<"), ("", [("weather", '{"city": "a<", "days": 5}')])),
    ("glm45", GLM.replace("<arg_value>", ""), ("", [WEATHER])),
    ("glm45", GLM.replace("</arg_value>", ""), ("", [WEATHER])),
    ("minimax_m2", f"Well.{M2}", ("Well.", [WEATHER])),
    ("minimax_m2", M2.replace('"', ""), ("", [WEATHER])),
    ("minimax_m2", M2.replace("</invoke>", "</invoke><invoke name='other'></invoke>"),
     ("", [WEATHER, ("other", "{}")])),
    ("deepseek_v32", f"Well.\n\n{DSML}", ("Well.", [WEATHER])),
    ("deepseek_v32", DSML.replace(">5<", ">[1, {}]<"), ("", [("weather", '{"city": "Paris", "days": [1, {}]}')])),
    ("deepseek_v4", DSML.replace("function_calls", "tool_calls"), ("", [WEATHER])),
    ("seed_oss", XML.replace("tool_call", "seed:tool_call").replace("\nParis\n", "Paris"), ("", [WEATHER])),
    ("deepseek_v41", DSML.replace("function_calls", "calls").replace("｜DSML｜", "｜DSML｜ "), ("", [WEATHER])),
    ("step3", f"Well.{STEP3}", ("Well.", [WEATHER])),
    ("step3", STEP3.replace("<｜tool_calls_end｜>", STEP3), ("", [WEATHER, WEATHER])),
    ("step3", STEP3.replace("Paris", "a < b"), ("", [("weather", '{"city": "a < b", "days": 5}')])),
    ("step3", STEP3.removeprefix("<｜tool_calls_begin｜>\n"), ("", [WEATHER])),
    ("hy_v3", f"Well.\n{HY}", ("Well.", [WEATHER])),
    ("hy_v3", HY.replace("</tool_calls>", "<tool_call>f<tool_sep></tool_call></tool_calls>"),
     ("", [WEATHER, ("f", "{}")])),
    ("hy_v3", HY.replace("<tool_sep>", ""), ("", [WEATHER])),
    ("hy_v4", HY.replace("<tool_sep>", "").replace("\n", ""), ("", [WEATHER])),
    ("minimax", '<tool_calls>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {"a": 1}}\n</tool_calls>',
     ("", [("f", "{}"), ("g", '{"a": 1}')])),
    ("solar_open", "Ok.<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>"
     '{"a": 1}<|tool_call:end|><|tool_call:begin|>b<|tool_call:name|>g<|tool_call:args|>{}<|tool_call:end|>',
     ("Ok.", [("f", '{"a": 1}'), ("g", "{}")])),
    ("gigachat3", 'So.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}',
     ("So.", [("f", '{"a": 1}')])),
    ("gigachat3", 'function call<|role_sep|>\n{"name": "f", "arguments": {}}', ("", [("f", "{}")])),
    ("muse_glimmer", 'Ok.<atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Paris'
     '</atem:parameter>\n<atem:parameter name="days">5</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
     ("Ok.", [WEATHER])),
    ("poolside_v1", GLM, ("", [WEATHER])),
    ("solar_open2", f"Well.{SOLAR}\n{SOLAR}", ("Well.", [WEATHER, WEATHER])),
    ("solar_open2", "<|tool_call:start|>f\n<|tool_call:end|>", ("", [("f", "{}")])),
    ("kimi_k3", f"Well.{K3}", ("Well.", [WEATHER])),
    ("kimi_k3", K3.replace('type="string"<|sep|>Paris', 'type="object"<|sep|>{"a": [1,]}'),
     ("", [("weather", '{"city": {"a": [1]}, "days": 5}')])),
    ("kimi_k3", '<|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>'
     "<|close|>call<|sep|>", ("", [("f", '{"a": 1}')])),
    ("kimi_k3", K3.replace('key="city"', 'key="a&quot;b"'), ("", [("weather", '{"a\\"b": "Paris", "days": 5}')])),
    ("minimax_m3", f"Well.\n{M3}", ("Well.", [WEATHER])),
    ("minimax_m3", M3.removeprefix(MARK), ("", [WEATHER])),
    ("minimax_m3", M3.replace(f"{MARK}</tool_call>", f'{MARK}<invoke name="f">{MARK}</invoke>{MARK}</tool_call>'),
     ("", [WEATHER, ("f", "{}")])),
    ("minimax_m3", M3.replace("Paris", "a ]<]mini <b> \\"),
     ("", [("weather", '{"city": "a ]<]mini <b> \\\\", "days": 5}')])),
    ("minimax_m3", M3.replace(f"{MARK}</city>", ""), ("", [WEATHER])),
    ("minimax_m3", M3.removesuffix(f"{MARK}</days>{MARK}</invoke>\n{MARK}</tool_call>"), ("", [WEATHER])),
    ("minimax_m3",
     M3.replace("<days>5", "<near>").replace("</days>", "</near>").replace(
         f"{MARK}</near>",
         "".join(f"\n{MARK}<item>{MARK}<name>{name}{MARK}</name>{MARK}<km>{km}{MARK}</km>{MARK}</item>"
                 for name, km in (("4", 4), ("", 1.5))) + f"\n{MARK}</near>"),
     ("", [("weather", '{"city": "Paris", "near": [{"name": "4", "km": 4}, {"name": "", "km": 1.5}]}')])),
    ("minimax_m3", M3.replace("<days>5", "<tags>").replace("</days>", "</tags>"),
     ("", [("weather", '{"city": "Paris", "tags": []}')])),
    ("inkling", 'Well.<|content_invoke_tool_json|>{"name": "f", "args": {"a": 1}}<|end_message|>',
     ("Well.", [("f", '{"a": 1}')])),
    ("xlam", '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
     ("", [("f", '{"a": 1}'), ("g", "{}")])),
    ("xlam", '\n```json\n[{"name": "f", "arguments": {"a": 1}}]\n```', ("", [("f", '{"a": 1}')])),
    ("xlam", 'Well. [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', ("Well.", [("f", '{"a": 1}')])),
    ("xlam", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', ("", [("f", "{}")])),
    ("xlam", '<tool_call>[{"name": "f"}]</tool_call>', ("", [("f", "{}")])),
    ("ernie45", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n', ("", [("f", "{}")])),
    ("gemma4", '<|tool_call>call:f{"a": {"b:c": "d"}}<tool_call|>', ("", [("f", '{"a": {"b:c": "d"}}')])),
    ("kimi_k2", f"Ok.{KIMI}", ("Ok.", [("f", '{"a": 1}')])),
    ("kimi_k2", KIMI.replace("<|tool_calls_section_begin|>", "").replace("functions.f:0", "f"),
     ("", [("f", '{"a": 1}')])),
    ("kimi_k2", KIMI.replace("1}", "1"), ("", [("f", '{"a": 1}')])),
    ("lfm2", "<|tool_call_start|>[f(a='x', b=[1]), g()]<|tool_call_end|>So.",
     ("So.", [("f", '{"a": "x", "b": [1]}'), ("g", "{}")])),
    ("olmo3", "<function_calls>\nf(a=1, b=true)\ng()\n</function_calls>",
     ("", [("f", '{"a": 1, "b": true}'), ("g", "{}")])),
    ("cohere_command3",
     '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n'
     '{"tool_name": "g"}]<|END_ACTION|>',
     ("", [("f", '{"a": 1}'), ("g", "{}")])),
    ("nemotron_json", 'A<TOOLCALL>[{"name": "f", "arguments": "{\\"a\\": 1}"}]</TOOLCALL>', ("A", [("f", '{"a": 1}')])),
    ("jamba", '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>', ("", [("f", "{}")])),
    ("internlm", '<|action_start|><|plugin|>\n{"name": "f", "parameters": {}}<|action_end|>', ("", [("f", "{}")])),
    ("apertus", '<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>', ("", [("f", '{"a": 1}'), ("g", "{}")])),
    ("gigachat3", 'So<|function_call|>{"name": "f", "arguments": {"a": 1}}', ("So", [("f", '{"a": 1}')])),
    ("granite-20b-fc", '<function_call> {"name": "f", "arguments": {}}\n<function_call> {"name": "g", "arguments": {}}',
     ("", [("f", "{}"), ("g", "{}")])),
    ("granite-20b-fc", '<function_call> {"name": "f", "arguments": {"a": x}}<function_call>{"name": "g"}',
     ("", [("f", '{"a": x}}'), ("g", "{}")])),
    ("minicpm5", '<function name="weather"><param name="city">Paris</param><param name="days">5</param></function>',
     ("", [WEATHER])),
    ("minicpm5", '<function name="weather"><param name="city"><![CDATA[<b> ]] </param>]]></param></function>',
     ("", [("weather", '{"city": "<b> ]] </param>"}')])),
    ("minicpm5", '<function name="weather"><param name="city"><![CDATA[x]]></function>',
     ("", [("weather", '{"city": "x"}')])),
    ("lfm2", "<|tool_call_start|>[f(a='x\ny\\n', b=\"\r\")]<|tool_call_end|>",
     ("", [("f", '{"a": "x\\ny\\n", "b": "\\r"}')])),
    ("longcat", '<longcat_tool_call>{"name": "f", "arguments": {}}</longcat_tool_call>', ("", [("f", "{}")])),
    ("gemma4", f"Ok.{GEMMA}{GEMMA}",
     ("Ok.", [("weather", '{"city": "Pa{r, i]s", "days": 5, "tags": [1, "b", {"c": true}]}')] * 2)),
    ("gemma4", '<|tool_call>weather(city:Paris<|"|>,days:5)<tool_call|>', ("", [WEATHER])),
    ("gemma4", '<|tool_call>call:weather{city:5,note:12:30,tags:["a", "b"],where:{}}<tool_call|>',
     ("", [("weather", '{"city": "5", "note": "12:30", "tags": ["a", "b"], "where": {}}')])),
    ("gemma4", "<|tool_call>call:f{}<tool_call|>", ("", [("f", "{}")])),
    ("gemma4", "<|tool_call>call:weather{tags:[1<tool_call|>", ("", [("weather", '{"tags": [1]}')])),
    ("gemma4", "<|tool_call>call:weather{days:1", ("", [("weather", '{"days": 1}')])),
    ("functiongemma", "<start_function_call>call:f{a:<escape>b, c<escape>,d:[]}<end_function_call>",
     ("", [("f", '{"a": "b, c", "d": []}')])),
    ("hermes", HERMES, ("", [ADD])),
    ("hermes", f"Well. \n{HERMES}\n", ("Well.", [ADD])),
    ("hermes", f"{HERMES}\n{HERMES}", ("", [ADD, ADD])),
    ("hermes", f"{HERMES} and more ", (" and more ", [ADD])),
    ("hermes", HERMES.removesuffix("</tool_call>"), ("", [ADD])),  # the model stopped where the tag was due
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"arguments": {"b": 2}, "name": "f"}</tool_call>', ("", [("f", '{"b": 2}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"b\\": 2}"}</tool_call>', ("", [("f", '{"b": 2}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', ("", [("f", "{}")])),  # a brace forgotten
    ("hermes", '<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', ("", [("f", "{}"), ("g", "{}")])),
    ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "g"}</tool_call>', ("", [("f", "{}"), ("g", "{}")])),
    ("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>', ("<tool_call>", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>.', (".", [("f", '{"a": tru}}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "unfin', ("", [("f", '{"a": "unfin')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\n\ty", }, }</tool_call>',
     ("", [("f", '{"a": "x\\n\\ty" }')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": [1, 2</tool_call>',
     ("", [("f", '{"a": {"b": [1, 2]}}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": [1, 2, ', ("", [("f", '{"a": {"b": [1, 2]}}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}}}\n}\n</tool_call>\n', ("", [("f", '{"a": [1]}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}} So', (" So", [("f", '{"a": 1}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"b\\": [2,]}}"}</tool_call>', ("", [("f", '{"b": [2]}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"p": "C:\\dir \\u00e", "q": "it\\\'s"}}</tool_call>',
     ("", [("f", '{"p": "C:\\\\dir \\\\u00e", "q": "it\'s"}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": True "b": None}}</tool_call>',
     ("", [("f", '{"a": true ,"b": null}')])),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\n</tool_call>',
     ("", [("f", "{}"), ("g", "{}")])),
    ("mistral", 'Ok[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
     ("Ok", [("f", '{"a": 1}'), ("g", "{}")])),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": "[TOOL_CALLS]"}',
     ("", [("f", '{"a": 1}'), ("g", '{"b": "[TOOL_CALLS]"}')])),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', ("", [("f", '{"a": 1}')])),
    ("mistral", '[TOOL_CALLS]f{"a": tru}[TOOL_CALLS]g{}', ("", [("f", '{"a": tru}'), ("g", "{}")])),
    ("llama3_json", '{"name": "f", "parameters": {"a": "b"}}', ("", [("f", '{"a": "b"}')])),
    ("llama3_json", ' <|python_tag|>{"type": "function", "name": "f", "parameters": {}}\n', ("", [("f", "{}")])),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"x": 1}}',
     ("", [("f", "{}"), ("g", '{"x": 1}')])),
    ("llama3_json", '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {"x": 1}}\n',
     ("", [("f", "{}"), ("g", '{"x": 1}')])),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}}', ("", [("f", '{"x": 1}')])),
    ("llama3_json", '{"name": "weather"}', ("", [("weather", "{}")])),
    ("llama3_json", 'So: <|python_tag|>{"name": "f", "parameters": {}}', ("So:", [("f", "{}")])),
    ("llama3_json", '{"name": "f", "parameters": {}}; and so on', ("; and so on", [("f", "{}")])),
    ("qwen3_coder", f"Sure.\n{XML}\n{XML}", ("Sure.", [("weather", '{"city": "Paris", "days": 5}')] * 2)),
    ("qwen3_coder", XML.removeprefix("<tool_call>\n"), ("", [("weather", '{"city": "Paris", "days": 5}')])),
    ("qwen3_coder", "<tool_call><function=other></function></tool_call>", ("", [("other", "{}")])),
    ("qwen3_coder", XML.replace("Paris", '"P"\n\n\tx</param'),
     ("", [("weather", '{"city": "\\"P\\"\\n\\n\\tx</param", "days": 5}')])),
    ("qwen3_coder", XML.removesuffix("\n5\n</parameter>\n</function>\n</tool_call>"),
     ("", [("weather", '{"city": "Paris", "days": ')])),
    # The end of a value left out, written twice, or within a value.
    ("qwen3_coder", XML.replace("</parameter>\n", ""), ("", [("weather", '{"city": "Paris", "days": 5}')])),
    ("qwen3_coder", XML.replace("\n</parameter>\n", ""), ("", [("weather", '{"city": "Paris", "days": 5}')])),
    ("qwen3_coder", XML.replace("</parameter>", "</parameter>\n</parameter>"),
     ("", [("weather", '{"city": "Paris", "days": 5}')])),
    ("qwen3_coder", XML.removesuffix("\n</function>\n</tool_call>"),
     ("", [("weather", '{"city": "Paris", "days": 5}')])),
    ("qwen3_coder", XML.removesuffix("</parameter>\n</function>\n</tool_call>") + "</function>",
     ("", [("weather", '{"city": "Paris", "days": 5}')])),
    ("qwen3_coder", XML.replace("Paris", "a </function> b <parameter=x> c"),
     ("", [("weather", '{"city": "a </function> b <parameter=x> c", "days": 5}')])),
    ("qwen3_coder", "<function=weather><parameter=city>\n<parameter=note>\nx\n</function>\n<function=other></function>",
     ("", [("weather", '{"city": "", "note": "x"}'), ("other", "{}")])),
    ("qwen3_coder", "<function=weather>stray</function>", ("", [("weather", "stray")])),
    ("pythonic", "[f(a=1, b='it\\'s', c=[True, None, ], d={'x': 1.5}), g()]",
     ("", [("f", '{"a": 1, "b": "it\'s", "c": [true, null], "d": {"x": 1.5}}'), ("g", "{}")])),
    ("pythonic", ' [ns.f-2( a = """x"\n""" , ) ] \n', ("", [("ns.f-2", '{"a": "x\\"\\n"}')])),
    ("pythonic", "[f(a=1)] done", (" done", [("f", '{"a": 1}')])),
    ("pythonic", "[f(a=1, b=x+1), g(a=-2)]", ("", [("f", '{"a": 1, "b": x+1}'), ("g", '{"a": -2}')])),
    ("pythonic", "[f(a='(', b=')", ("", [("f", '{"a": "(", b=\')')])),
    ("llama4_pythonic", "Text <|python_start|>[f(a=1)]<|python_end|>", ("Text", [("f", '{"a": 1}')])),
    ("llama4_pythonic", "[f(a=1)]", ("", [("f", '{"a": 1}')])),
    ("deepseek_v3", f"Hm{CALLS}{V3_CALL}\n{V3_CALL}{CALLS_END}", ("Hm", [("f", '{"a": 1}')] * 2)),
    ("deepseek_v31", f"{CALLS}{V31_CALL}{V31_CALL}{CALLS_END}", ("", [("f", '{"a": 1}')] * 2)),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', ("", [("f", '{"a": 1}')])),
    ("granite", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]',
     ("", [("f", '{"a": 1}'), ("g", "{}")])),
    ("phi4_mini_json", 'With functools.cache: functools[{"name": "f", "arguments": {"a": 1}}]',
     ("With functools.cache:", [("f", '{"a": 1}')])),
    ("phi4_mini_json", '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>', ("", [("f", "{}")])),
]  # fmt: skip


def test_the_option_knows_every_parser() -> None:
    assert tuple(TOOL_CALL_PARSERS) == TOOL_CALL_PARSER_NAMES


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_at_every_cut(name: str, text: str, expected: Parsed) -> None:
    assert parse(name, text) == expected
    assert parse(name, *text) == expected
    for cut in range(len(text)):
        assert parse(name, text[:cut], text[cut:]) == expected


@pytest.mark.parametrize(("name", "text", "expected"), [case for case in CASES if case[2][0] == ""])
def test_what_is_cut_off_within_calls_is_no_text(name: str, text: str, expected: Parsed) -> None:
    """Except for an incomplete tag, and calls without tags, whose function is not known to be on offer."""
    tags = {*TOOL_CALL_PARSERS[name].markers, "functools", "<function=", "<tool_call>"}
    tags |= {
        "<|message_sep|>\n\nfunction call<|role_sep|>",
        "function call<|role_sep|>",
        f"{MARK}<tool_call>",
        "<|open|>tools<|sep|>",
        "<|open|>call tool=",
    }  # which are several tokens
    for cut in range(len(text)):
        parser = TOOL_CALL_PARSERS[name](TOOLS)
        turn = Turn.of(parser.feed(text[:cut]) + parser.finish(cut_off=True))
        if name in ("llama3_json", "pythonic", "llama4_pythonic", "xlam") and not turn.calls:
            continue
        assert any(tag.startswith(turn.content) for tag in tags)
        made = [call.name for call in turn.calls]
        assert made == [function for function, _ in expected[1]][: len(made)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arg'),
        ("llama3_json", '{"name": "weather", "par'),
        ("mistral", "[TOOL_CALLS]weather[ARGS]"),
        ("mistral", '[TOOL_CALLS] [{"name": "weather"'),
        ("pythonic", "[weather(city='Par"),
        ("deepseek_v31", f"{CALLS}<｜tool▁call▁begin｜>weather<｜tool▁sep｜>"),
        ("deepseek_v3", f"{CALLS}<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"),
        ("granite", '<|tool_call|>[{"name": "weather", '),
        ("qwen3_coder", "<tool_call>\n<function=weather>"),
    ],
)
def test_a_call_that_is_cut_off_before_its_arguments_is_given(name: str, text: str) -> None:
    parser = TOOL_CALL_PARSERS[name](TOOLS)
    turn = Turn.of(parser.feed(text) + parser.finish(cut_off=True))
    assert (turn.content, [(call.name, call.arguments) for call in turn.calls]) == ("", [("weather", "")])


NO_CALLS: list[tuple[str, str]] = [
    *(("hermes", f"{before}<tool_call>{body}{after}")
      for before in ("", "So \n") for after in ("", "</tool_call>", "\n</tool_call>\n")
      for body in (
          "not json", "", "[1]", "[]", "null", "{}", '{"arguments": {}}', '{"name": 3}', '{"name": ""}',
          '{"name": "f", "arguments": 3}', '{"name": "f", "arguments": "x"}', '{"name": "f"', '{"name": "\\ud800"}',
      )),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("mistral", "[TOOL_CALLS][ARGS]{}"),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", '{"name": "Ada"}'),
    ("llama3_json", '{"name": "Ada", "type": "person"}'),
    ("llama3_json", '{"name": "Bob", "age": 3}'),
    ("llama3_json", '  hello {"name": "f", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("qwen3_coder", "<tool_call>\n<function=f\n>"),
    ("qwen3_coder", "<tool_call>{}</tool_call> <function=>"),
    *((name, opening + body)
      for name, opening in (("hermes", "<tool_call>"), ("granite", "<|tool_call|>"), ("jamba", "<tool_calls>"),
                            ("mistral", "[TOOL_CALLS]"), ("xlam", "<tool_call>"), ("xlam", ""))
      for body in ('{"name": "Ada"}', '[{"name": "Ada"}]', '{"name": "Ada", "age": 36}')),
    ("xlam", "[1, 2]"),
    ("xlam", "```json\n[{}]\n```"),
    ("xlam", "```python\nx = [1]\n```"),
    ("minimax_m3", f"{MARK}<tool_call> is a tag"),
    ("minimax_m3", '<tool_call>{"name": "f"}</tool_call>'),
    ("minimax_m3", f"{MARK}<invoke name="),
    ("step3", "<｜tool_calls_begin｜>?<｜tool_calls_end｜>"),
    ("hy_v3", "<tool_calls>[]</tool_calls>"),
    ("solar_open2", "<|tool_call:start|>\n<|tool_call:end|>"),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool=""<|sep|>'),
    ("kimi_k3", "<|open|>tools<|sep|>none<|close|>tools<|sep|>"),
    ("inkling", '<|content_invoke_tool_json|>{"args": {}}<|end_message|>'),
    ("pythonic", "[link](http://x)"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=x+1)]"),
    ("pythonic", "[f(a=(1]))]"),
    ("pythonic", "f(a=1)"),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜>{V31_CALL}"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    ("granite", "<|tool_call|> ?"),
    ("glm45", "<tool_call> is a tag"),
    ("glm45", '<tool_call>{"name": "f"}</tool_call>'),
    ("minimax_m2", "<minimax:tool_call> and <invoke name=\n"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_end|>"),
    ("gemma4", "<|tool_call> is how I call"),
    ("apertus", "<|tools_prefix|>[]<|tools_suffix|>"),
    ("minicpm5", "<function name=x"),
    ("gemma4", "<|tool_call>call:"),
    ("lfm2", "<|tool_call_start|>nothing"),
    ("cohere_command3", "<|START_ACTION|>[]<|END_ACTION|>"),
    ("phi4_mini_json", "functools.cache"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    assert parse(name, text) == (text, [])
    assert parse(name, *text) == (text, [])


@pytest.mark.parametrize("name", NAMES)
def test_deep_nesting_ends_well(name: str) -> None:
    for bracket in ("[", "{", "(", '{"a":', "-"):
        parse(name, f'<tool_call>{{"name": "f", "arguments": {{"a": {bracket * 20_000}')
        parse(name, f"[f(a={bracket * 20_000})]")


PIECES = [
    '{"name": "f", "arguments": ',
    "{",
    "[",
    '"a": ',
    '"',
    "\\",
    "\\u12",
    "\n",
    ",",
    "}",
    "]",
    " ",
    "1",
    "Tru",
    "True",
    "-",
]


@QUICK
@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join), st.lists(st.integers(0, 60), max_size=6))
def test_damaged_json_in_any_pieces(damaged: str, cuts: list[int]) -> None:
    """The resulting JSON is the same however the text is cut, and valid JSON stays as it is."""
    text = f'<tool_call>{{"name": "f", "arguments": {{{damaged}</tool_call>'
    ends = sorted(min(cut, len(text)) for cut in cuts)
    expected = parse("hermes", text)
    assert parse("hermes", *(text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True))) == expected
    assert parse("hermes", *text) == expected
    if is_json(f"{{{damaged}"):
        assert expected[1][0] == ("f", f"{{{damaged}".rstrip())


def test_hostile_text_takes_linear_time() -> None:
    """Tens of thousands of brackets, commas or escapes that each have to be mended."""
    for part in ("]", "}", ",", "\\q", "[}", '"a" ', "{"):
        parse("hermes", '<tool_call>{"name": "f", "arguments": {"a": [' + part * 20_000)
        parse("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + part * 20_000)
    parse("qwen3_coder", "<function=weather><parameter=city>" + "</function>\n<parameter=" * 8_000)
    parse("hy_v3", "<tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>" + "</tool_call>x" * 8_000)
    for part in ("<a>", "</b>", "<invoke name=", ""):
        parse("minimax_m3", f'{MARK}<invoke name="f">' + f"{MARK}{part}" * 8_000)
    for name in ("llama4_pythonic", "lfm2"):  # beginnings of calls; each may go on to the end
        opening = TOOL_CALL_PARSERS[name].markers[0]
        text = f"{opening}[f(a='" * 2_000
        assert parse(name, text) == (text, [])


def test_arguments_are_given_as_they_come() -> None:
    texts = ("<tool_call>{", '"name": "f", "arguments": {"te', 'xt": "Hel', "lo", ' you"', "}}", "</tool_call>")
    first, *rest = pieces_of("hermes", *texts)
    assert first == []
    (start, opening), *middle = rest[:5]
    assert isinstance(start, CallStart)
    assert (start.index, start.name) == (0, "f")
    assert opening == CallArguments(0, '{"te')
    expected = ['xt": "Hel', "lo", ' you"', "}"]
    assert middle == [[CallArguments(0, text)] for text in expected]
    assert rest[5:] == [[], []]


def test_tags_may_have_the_suffix_of_a_vocabulary() -> None:
    tags = ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    suffixed = HY
    for tag in tags:
        suffixed = suffixed.replace(f"{tag}>", f"{tag}:6124c78e>")
    parser = TOOL_CALL_PARSERS["hy_v3"].in_vocabulary(Tokenizer(ByteBackend([f"<{tag}:6124c78e>" for tag in tags])))
    assert "<arg_value:6124c78e>" in parser.markers
    reader = parser(TOOLS)
    turn = Turn.of([*(piece for text in suffixed for piece in reader.feed(text)), *reader.finish()])
    assert (turn.content, [(call.name, call.arguments) for call in turn.calls]) == ("", [WEATHER])
    plain = TOOL_CALL_PARSERS["hy_v3"]
    assert plain.in_vocabulary(Tokenizer(ByteBackend(["<tool_calls>"]))) is plain


def test_xml_strings_are_given_as_they_come() -> None:
    texts = ("<function=weather><parameter=city>", "\nPa", "r\n", "is", "\n</param", "eter></function>")
    first, *rest = pieces_of("qwen3_coder", *texts)
    assert isinstance(first[0], CallStart)
    assert rest == [[CallArguments(0, text)] for text in ('{"city": "Pa', "r", "\\nis")] + [
        [],
        [CallArguments(0, '"}')],
        [],
    ]


def test_text_is_not_held_back_without_a_reason() -> None:
    assert pieces_of("hermes", "Hello", " world <", "b>") == [["Hello"], [" world"], [" <b>"], []]
    assert pieces_of("llama3_json", "Hel", "lo") == [["Hel"], ["lo"], []]
    assert pieces_of("pythonic", "[1", ", 2]") == [["[1"], [", 2]"], []]


def test_mistrals_ids_are_what_its_templates_take() -> None:
    text = '[TOOL_CALLS]f{}[TOOL_CALLS]g[CALL_ID]abc123XYZ[ARGS]{}[TOOL_CALLS][{"name": "h"}]'
    turn = Turn.of(piece for pieces in pieces_of("mistral", text) for piece in pieces)
    ids = [call.id for call in turn.calls]
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert ids[1] == "abc123XYZ"
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("parameter", "text", "expected"),
    [
        ("city", "5", "5"), ("city", "", ""), ("city", "None", "None"),
        ("days", "5", 5), ("days", "five", "five"), ("days", "NaN", "NaN"), ("days", "1e999", float("inf")),
        ("exact", "True", True), ("exact", "false", False),
        ("tags", '["a", 1]', ["a", 1]), ("tags", "['a', None]", ["a", None]), ("tags", "a, b", "a, b"),
        ("where", '{"a": {}}', {"a": {}}), ("where", "null", None), ("where", "{'a': 'it'}", {"a": "it"}),
        ("note", "null", None), ("note", "None", None), ("note", "[]", "[]"),
        ("unit", "C", "C"), ("level", "2", 2), ("free", "1", "1"), ("unknown", "{}", "{}"),
    ],
)  # fmt: skip
def test_xml_values_are_what_the_schema_says(parameter: str, text: str, expected: Any) -> None:
    body = f"<function=weather><parameter={parameter}>\n{text}\n</parameter></function>"
    _, [(_, arguments)] = parse("qwen3_coder", body)
    assert json.loads(arguments) == {parameter: expected}


# What a template would write for calls, by format.

Call = tuple[str, dict[str, Any]]


def _json_call(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _xml_call(call: Call) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call[1].items())
    return f"<tool_call>\n<function={call[0]}>\n{parameters}</function>\n</tool_call>"


def _python_call(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{_json_call(call)}\n</tool_call>" for call in calls),
    "mistral": lambda calls: "[TOOL_CALLS] [" + ", ".join(map(_json_call, calls)) + "]",
    "llama3_json": lambda calls: "; ".join(_json_call(call, "parameters") for call in calls),
    "granite": lambda calls: "<|tool_call|>[" + ", ".join(map(_json_call, calls)) + "]",
    "phi4_mini_json": lambda calls: "functools[" + ", ".join(map(_json_call, calls)) + "]",
    "qwen3_coder": lambda calls: "\n".join(map(_xml_call, calls)),
    "pythonic": lambda calls: "[" + ", ".join(map(_python_call, calls)) + "]",
    "llama4_pythonic": lambda calls: "<|python_start|>[" + ", ".join(map(_python_call, calls)) + "]<|python_end|>",
    "deepseek_v3": lambda calls: CALLS + "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ) + CALLS_END,
    "deepseek_v31": lambda calls: CALLS + "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ) + CALLS_END,
}  # fmt: skip


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_gemma, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_gemma(item)}' for key, item in value.items())}}}"
    return json.dumps(value)


def _listed(opening: str, closing: str, name: str = "name", key: str = "arguments") -> Callable[[list[Call]], str]:
    return lambda calls: opening + json.dumps([{name: call[0], key: call[1]} for call in calls]) + closing


WRITERS = {
    **WRITERS,
    "kimi_k2": lambda calls: "".join(
        f"<|tool_call_begin|>functions.{call[0]}:{i}<|tool_call_argument_begin|>{json.dumps(call[1])}<|tool_call_end|>"
        for i, call in enumerate(calls)
    ),
    "lfm2": lambda calls: f"<|tool_call_start|>[{', '.join(map(_python_call, calls))}]<|tool_call_end|>",
    "cohere_command3": _listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    "nemotron_json": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "jamba": _listed("<tool_calls>", "</tool_calls>"),
    "xlam": _listed("", ""),
    "apertus": lambda calls: f"<|tools_prefix|>{json.dumps([dict([call]) for call in calls])}<|tools_suffix|>",
}
# These write texts as they are. So values that only the schema tells apart are not in their round trip.
XML_WRITERS: Mapping[str, Callable[[list[Call]], str]] = {
    "qwen3_coder": WRITERS["qwen3_coder"],
    "glm45": lambda calls: "\n".join(
        f"<tool_call>{name}"
        + "".join(f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in arguments.items())
        + "\n</tool_call>"
        for name, arguments in calls
    ),
    "minimax_m2": lambda calls: "<minimax:tool_call>" + "".join(
        f'<invoke name="{name}">'
        + "".join(f'<parameter name="{key}">{value}</parameter>' for key, value in arguments.items())
        + "</invoke>"
        for name, arguments in calls
    ) + "</minimax:tool_call>",
    "deepseek_v32": lambda calls: "<｜DSML｜function_calls>" + "".join(
        f'<｜DSML｜invoke name="{name}">'
        + "".join(
            f'<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>'
            for key, value in arguments.items()
        )
        + "</｜DSML｜invoke>"
        for name, arguments in calls
    ) + "</｜DSML｜function_calls>",
    "gemma4": lambda calls: "".join(f"<|tool_call>call:{name}{_gemma(made)}<tool_call|>" for name, made in calls),
    "minimax_m3": lambda calls: f"{MARK}<tool_call>" + "".join(
        f'{MARK}<invoke name="{name}">'
        + "".join(f"{MARK}<{key}>{value}{MARK}</{key}>" for key, value in arguments.items()) + f"{MARK}</invoke>"
        for name, arguments in calls
    ) + f"{MARK}</tool_call>",
    "kimi_k3": lambda calls: "<|open|>tools<|sep|>" + "".join(
        f'<|open|>call tool="{name}" index="1"<|sep|>'
        + "".join(
            f'<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>'
            for key, value in arguments.items()
        )
        + "<|close|>call<|sep|>"
        for name, arguments in calls
    ) + "<|close|>tools<|sep|>",
    "hy_v3": lambda calls: "<tool_calls>\n" + "".join(
        f"<tool_call>{name}<tool_sep>\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
        + "</tool_call>\n"
        for name, arguments in calls
    ) + "</tool_calls>",
    "solar_open2": lambda calls: "\n".join(
        f"<|tool_call:start|>{name}\n"
        + "".join(f"<|tool_arg:start|>{key}<|tool_arg:value|>{value}<|tool_arg:end|>\n" for key, value in made.items())
        + "<|tool_call:end|>"
        for name, made in calls
    ),
    "step3": lambda calls: "<｜tool_calls_begin｜>\n" + "".join(
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n'
        + "".join(f'<steptml:parameter name="{key}">{value}</steptml:parameter>\n' for key, value in made.items())
        + "</steptml:invoke><｜tool_call_end｜>\n"
        for name, made in calls
    ) + "<｜tool_calls_end｜>",
}  # fmt: skip

names = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), min_size=1, max_size=3)
string_calls = st.lists(st.tuples(names, st.dictionaries(names, texts, max_size=3)), min_size=1, max_size=3)
prose = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Zs", "Cc"]), max_size=10)


@QUICK
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "qwen3_coder"])
@given(data=st.data())
def test_calls_survive_the_trip(name: str, data: st.DataObject) -> None:
    made = data.draw(calls)
    text, parsed = parse(name, *WRITERS[name](made))
    assert text == ""
    assert [(call, json.loads(arguments)) for call, arguments in parsed] == made


@QUICK
@pytest.mark.parametrize("name", XML_WRITERS)
@given(made=string_calls)
def test_calls_without_json_survive_the_trip(name: str, made: list[Call]) -> None:
    text, parsed = parse(name, *XML_WRITERS[name](made))
    assert text == ""
    assert [(call, json.loads(arguments)) for call, arguments in parsed] == made


def fragments(name: str) -> st.SearchStrategy[str]:
    tags = [
        *TOOL_CALL_PARSERS[name].markers, "<function=", "</function>", "<parameter=city>", "</parameter>", "```json",
        "functools", '{"name": "f", "arguments": {', "[", "f(a=", "'", '"', ")", "]", "}", "; ", "\n", " ",
        '<invoke name="f">', '<parameter name="city">', "</invoke>", "weather", "call:f{", "a:", ",", "functions.f:0",
    ]  # fmt: skip
    whole = st.builds({**WRITERS, **XML_WRITERS}.get(name, WRITERS["hermes"]), string_calls)
    return st.one_of(st.sampled_from(tags), st.sampled_from(tags).map(lambda tag: tag[:-1]), whole, prose)


# Each character is a piece of its own, in each example.
@QUICK
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_any_text_gives_the_same_in_any_pieces(name: str, data: st.DataObject) -> None:
    text = data.draw(st.lists(fragments(name), max_size=8).map("".join))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = parse(name, text)
    assert parse(name, *pieces) == expected
    assert parse(name, *text) == expected


@QUICK
@pytest.mark.parametrize("name", NAMES)
@given(text=st.text())
def test_plain_text_is_untouched(name: str, text: str) -> None:
    assert parse(name, *text) == (text, [])
    assert parse(name, f"Well: {text}") == (f"Well: {text}", [])
