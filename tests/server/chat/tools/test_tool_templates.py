# ruff: noqa: RUF001 - DeepSeek's tags are spelt with full-width bars
"""Conversations with tools in the style of known families' templates, and calls read back from what they write."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from server.conftest import RunningServer, StartServer

from tidewheel.server.chat.messages import template_messages, template_tools
from tidewheel.server.chat.model_formats import model_formats
from tidewheel.server.chat.pieces import Turn
from tidewheel.server.chat.templates import ChatTemplate
from tidewheel.server.chat.tools import TOOL_CALL_PARSERS
from tidewheel.server.errors import ApiError
from tidewheel.server.protocol.chat import Message, Tool

CHAT = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ARGUMENTS = {"city": "Köln", "days": 2}


def conversation(num_calls: int) -> list[Message]:
    ids = [f"call{i:05}" for i in range(num_calls)]
    function = {"name": "weather", "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    results = [{"role": "tool", "tool_call_id": call_id, "content": "sunny"} for call_id in ids]
    messages = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    return msgspec.convert([*messages, *results], list[Message])


QWEN = """
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\\n' }}<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
{%- if not loop.first or message.content %}{{ '\\n' }}{% endif %}<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN_CODER = """
{%- for message in messages %}
{%- if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}
<tool_call>
<function={{ tool_call.name }}>
{% for name, value in tool_call.arguments | items %}
{%- set value = value | tojson if value is mapping or (value is sequence and value is not string) else value | string %}
<parameter={{ name }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}"""

LLAMA = """
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}"""

MISTRAL = """
{%- for message in messages %}
{%- if message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{%- set out = call.function | tojson %}{{ out[:-1] }}, "id": "{{ call.id }}"}{{ ', ' if not loop.last else ']</s>' }}
{%- endfor %}
{%- elif message.role == 'tool' -%}
[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}
{%- else %}[INST] {{ message.content }}[/INST]
{%- endif %}
{%- endfor %}"""

# DeepSeek's own templates join the arguments to strings, so they have to be text as well as a mapping.
DEEPSEEK = """
{%- for message in messages %}
{%- if message.role == 'tool' %}<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>
{%- elif message.tool_calls %}<｜Assistant｜><｜tool▁calls▁begin｜>
{%- for tool in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' +
    tool['function']['arguments'] + '\\n```' + '<｜tool▁call▁end｜>' }}
{%- endfor %}<｜tool▁calls▁end｜>
{%- else %}<｜User｜>{{ message.content }}
{%- endif %}
{%- endfor %}"""

# Phi-4-mini's writes them out as they are.
PHI = """
{%- for message in messages %}<|{{ message.role }}|>
{%- if message.tool_calls %}functools[{% for call in message.tool_calls %}
{%- if not loop.first %}, {% endif %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}
{%- endfor %}]
{%- else %}{{ message.content }}
{%- endif %}<|end|>
{%- endfor %}"""

JSON = '{"city": "Köln", "days": 2}'
FAMILIES: list[tuple[str, str, int, str, str]] = [
    ("hermes", QWEN, 2, "<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n"),
    ("qwen3_coder", QWEN_CODER, 2, "<|im_start|>assistant\n", "<|im_end|>\n<tool_response>sunny"),
    ("llama3_json", LLAMA, 1, "assistant<|end_header_id|>\n\n",
     '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"sunny"'),
    ("mistral", MISTRAL, 2, "[/INST]", '</s>[TOOL_RESULTS] {"content": sunny, "call_id": "call00000"}'),
    ("deepseek_v3", DEEPSEEK, 2, "<｜Assistant｜>", "<｜tool▁output▁begin｜>sunny"),
    ("phi4_mini_json", PHI, 2, "<|assistant|>", "<|end|><|tool|>sunny"),
]  # fmt: skip


SHOWS_TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"


@pytest.mark.parametrize(("name", "template"), [family[:2] for family in FAMILIES])
def test_a_format_is_found_by_what_the_template_writes(name: str, template: str) -> None:
    assert model_formats(SHOWS_TOOLS + template).tool_calls == name
    assert model_formats({"default": "{{ messages }}", "tool_use": SHOWS_TOOLS + template}).tool_calls == name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        # What templates tell the model to write, where they do not write calls themselves.
        ("hermes", r'{{ "<tool_call>\n{\"name\": <name>, \"arguments\": <arguments>}\n</tool_call>" }}'),
        ("qwen3_coder", "<tool_call><function=NAME><parameter=KEY>"),
        ("granite", "write <|tool_call|> and a list of calls"),
        ("phi4_mini_json", "<|tool_call|>[...]<|/tool_call|>"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>"),
        ("pythonic", "[name(key=value), other()]"),
        ("llama4_pythonic", "<|header_start|>[name(key=value), other()]"),
        ("llama3_json", r'{{ "\"parameters\": " }}{{- call.function.arguments | tojson }}'),
        ("glm45", "<tool_call>NAME<arg_key>KEY</arg_key> arguments"),
        ("seed_oss", "<seed:tool_call><function=NAME><parameter=KEY>"),
        ("lfm2", "<|tool_call_start|>[name(key=value)]<|tool_call_end|>"),
        ("lfm2", "List of tools: <|tool_list_start|>"),
        ("olmo3", "<function_calls></function_calls>"),
        ("gemma4", "<|tool_call>call:{{ name }}{"),
        ("functiongemma", "<start_function_call>call:"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}"),
        ("minimax_m2", '<minimax:tool_call><invoke name="">'),
        ("deepseek_v32", "<｜DSML｜function_calls><｜DSML｜invoke"),
        ("deepseek_v4", "<｜DSML｜tool_calls><｜DSML｜invoke"),
        ("cohere_command3", '<|START_ACTION|>[{"tool_name": "", "parameters": {{ call.arguments }}}]'),
        ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>"),
        ("jamba", "<tool_calls>[]</tool_calls>"),
        ("internlm", "<|action_start|><|plugin|>"),
        ("longcat", "<longcat_tool_call>{}</longcat_tool_call>"),
        ("apertus", "<|tools_prefix|>[]<|tools_suffix|>"),
        ("gigachat3", "<|function_call|>{{ call }}"),
        ("granite-20b-fc", "<function_call> {{ call }}"),
        ("minicpm5", '<function name="{{ name }}"><param name="{{ key }}">'),
        ("minimax_m3", "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=... arguments"),
        ("step3", '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="'),
        ("deepseek_v41", "<｜DSML｜ calls><｜DSML｜ invoke"),
        ("hy_v3", "<tool_calls><tool_call>NAME<tool_sep><arg_key>KEY</arg_key> arguments"),
        ("hy_v3", "<tool_calls:6124c78e><tool_call:6124c78e>NAME<tool_sep:6124c78e><arg_key:6124c78e> arguments"),
        ("hy_v4", "<tool_calls:opensource><tool_call:opensource>NAME<arg_key:opensource> arguments"),
        ("solar_open2", "<|tool_call:start|>{{ call.function.name }}"),
        ("kimi_k3", "{{ '<|open|>' + tag + '<|sep|>' }}{{ '<|close|>' }}{{ tool_call.arguments }}"),
        ("inkling", "<|content_invoke_tool_json|>{{ arguments }}"),
        ("xlam", r"make calls in a single JSON array: [{\"name\": \"tool_call_name\", \"arguments\": {}}]"),
        ("solar_open", "<|tool_call:begin|>{{ call.id }}<|tool_call:name|>"),
        ("gigachat3", "{{ 'function call' + '<|role_sep|>' }}"),
        ("lfm2", "{{ 'List of tools: [' }}{{ keep_past_thinking }}"),
        ("deepseek_v4", "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'tool_calls>' }}"),
        ("deepseek_v32", "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'function_calls>' }}"),
        ("deepseek_v41", "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + ' calls>' }}"),
        ("jamba", "in <tool_call></tool_call>: <tool_calls>[{...}]</tool_calls> arguments"),
        ("minimax", "respond with <tool_calls></tool_calls> XML tags, and provide tool-name and arguments"),
        ("muse_glimmer", '<atem:function_calls><atem:invoke name="'),
        # Formats that no parser reads.
        (None, "<tool_calls><tool_call>NAME</tool_call> arguments"),
        (None, '{"name": "f", "parameters": {{ tool.parameters | tojson }}}'),
        (None, ""),
    ],
)
def test_a_format_is_found_by_what_the_template_tells(name: str | None, told: str) -> None:
    formats = model_formats(SHOWS_TOOLS + told)
    assert formats.tool_calls == name
    assert ("does not show" in formats.no_calls_because) == (name is None)


def test_tools_may_have_another_name() -> None:
    assert model_formats("{{ xml_tools }}<tool_call> arguments").tool_calls == "hermes"


@pytest.mark.parametrize("source", ["{{ messages }}", "{{ a.tools }}", "{{ a['tools'] }}", "tools", "{% if"])
def test_a_template_without_tools_tells_of_no_calls(source: str) -> None:
    formats = model_formats(source + "<tool_call> arguments")
    assert (formats.tool_calls, formats.tools_as_text) == ("hermes", True)  # which messages tell of
    assert model_formats(source, "none").tool_calls is None
    chosen = model_formats(source, "hermes")
    assert (chosen.tool_calls, chosen.tools_as_text) == ("hermes", False)
    assert model_formats(None).tool_calls is model_formats({}).tool_calls is None


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("qwen3", "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"),
        ("qwen3", "{{ content.split('</think>')[-1] }}"),
        ("qwen3", "<｜Assistant｜><think>\n{{ content.split('</think>')[-1] }}"),
        ("deepseek_r1", "<｜Assistant｜>{{ content.split('</think>')[-1] }}"),
        ("mistral", "[THINK]{{ thought }}[/THINK]"),
        ("seed_oss", "<seed:think>{{ thought }}</seed:think>"),
        ("gemma4", "{{ text.split('<channel|>')[-1] }}"),
        ("cohere_command3", "<|START_THINKING|>{{ thought }}<|END_THINKING|>"),
        ("minimax_m3", "<mm:think>"),
        ("minimax_m2", "<minimax:tool_call><think></think><response>{{ result }}</response>"),
        ("solar_open", "<|begin|>assistant<|think|><|end|>"),
        ("muse_glimmer", "{{ '<|start|>assistant to=self<|message|>' + thought }}"),
        ("ernie45", "<think></think><response>{{ message.content }}</response>"),
        ("hunyuan_a13b", "{{ content.split('<answer>')[-1] }}<think></think>"),
        ("granite", "Write your thoughts after 'Here is my thought process:'"),
        ("apriel", "{{ content.split('[BEGIN FINAL RESPONSE]')[-1] }}"),
        ("apertus", "<|inner_prefix|>{{ thought }}<|inner_suffix|>"),
        ("longcat", "<longcat_think>"),
        ("solar_open2", "<|think:start|>{{ thought }}<|think:end|>"),
        ("kimi_k3", "{{ '<|open|>' + tag + '<|sep|>' }}{{ '<|close|>' }}"),
        ("inkling", "<|content_thinking|>{{ thought }}<|end_message|>"),
        ("hy_v3", "<tool_call:a><tool_sep:a><arg_key:a></think:a>"),
        (None, "{{ messages }}"),
    ],
)
def test_reasoning_is_found_too(name: str | None, template: str) -> None:
    assert model_formats(template).reasoning == name
    assert model_formats(template, reasoning_parser="none").reasoning is None
    assert model_formats(template, reasoning_parser="glm45").reasoning == "glm45"


def test_a_server_says_what_it_found_and_reads_it(start_server: StartServer) -> None:
    unused = "{% if not messages and tools %}<tool_call>{{ arguments }}</think>{% endif %}"
    template = "{{ messages[0].content }}" + unused
    server: RunningServer = start_server(engine={"template": template})
    info = server.http.get("/server_info").json()
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", "qwen3")
    said = '<think>hm</think>Sure.<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    asked = {"messages": [{"role": "user", "content": f"SAY({said})YAS"}]}
    message = server.post(CHAT, {**asked, "tools": [TOOL]}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Sure.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    message = server.post(CHAT, asked).json()["choices"][0]["message"]  # calls are looked for where tools are offered
    assert message["content"] == said.removeprefix("<think>hm</think>")
    off: RunningServer = start_server(engine={"template": template}, tool_call_parser="none", reasoning_parser="none")
    info = off.http.get("/server_info").json()
    assert (info["tool_call_parser"], info["reasoning_parser"]) == (None, None)


@pytest.mark.parametrize(("name", "template", "num_calls", "before", "after"), FAMILIES)
def test_calls_and_results_go_through(name: str, template: str, num_calls: int, before: str, after: str) -> None:
    tools = [msgspec.convert(TOOL, Tool)]
    prompt = ChatTemplate(template, {}).render(
        template_messages(conversation(num_calls)), template_tools(tools), add_generation_prompt=False
    )
    written, found, _ = prompt.partition(before)[2].partition(after)
    assert found
    parser = TOOL_CALL_PARSERS[name](tools)
    turn = Turn.of(parser.feed(written) + parser.finish())
    assert turn.content == ""
    assert [(call.name, json.loads(call.arguments)) for call in turn.calls] == [("weather", ARGUMENTS)] * num_calls


def test_qwens_prompt_to_the_letter() -> None:
    prompt = ChatTemplate(QWEN, {}).render(
        template_messages(conversation(1)), template_tools([msgspec.convert(TOOL, Tool)])
    )
    assert prompt == (
        f"<|im_start|>system\n# Tools\n{json.dumps(TOOL)}\n<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n"
        f'<|im_start|>assistant\n<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_templates_complaint_about_calls_reaches_the_client() -> None:
    with pytest.raises(ApiError, match="only one call at once"):
        ChatTemplate(LLAMA, {}).render(template_messages(conversation(2)))


def test_ids_of_the_mistral_parser_pass_its_template() -> None:
    parser = TOOL_CALL_PARSERS["mistral"]([])
    (call,) = Turn.of(parser.feed('[TOOL_CALLS]weather{"days": 1}') + parser.finish()).calls
    sent: dict[str, Any] = {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
    messages: Any = msgspec.convert([{"role": "assistant", "tool_calls": [sent]}], list[Message])
    assert call.id in ChatTemplate(MISTRAL, {}).render(template_messages(messages))
