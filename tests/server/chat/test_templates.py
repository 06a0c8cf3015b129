"""Chat templates: what Hugging Face's templates rely on, and what they must not be able to do."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server.conftest import StartProcess
from server.scripted_engine import SECONDS

from tidewheel.engine.errors import ModelError
from tidewheel.server.chat.templates import ChatTemplate, read_template_option
from tidewheel.server.errors import ApiError
from tidewheel.server.protocol.chat import REASONING_EFFORTS

USER = [{"role": "user", "content": "<a> & 'é'"}]


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s><a> & 'é'</s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<a> & \'é\'"}]'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
        ("{% if true %}\n  {% set x = 1 %}\nline\n{% endif %}\n", "line\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ tools is none }}{{ undefined_thing is defined }}", "TrueFalse"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ messages[0]['content'].split('&')[0].strip() }}", "<a>"),
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('a') }}", "aa"),
        ("{{ add_generation_prompt }}", "True"),
    ],
)
def test_what_templates_use(source: str, expected: str) -> None:
    assert render(source) == expected


def test_requests_variables_never_replace_the_messages() -> None:
    variables = {"messages": [], "add_generation_prompt": False, "enable_thinking": False}
    source = "{{ messages | length }}{{ add_generation_prompt }}{{ enable_thinking }}"
    assert render(source, variables=variables) == "1TrueFalse"


def test_a_template_of_its_own_for_tools() -> None:
    others = {str(number): "{% if %}" for number in range(3)}  # never compiled, as they are not asked for
    template = ChatTemplate({"default": "plain", "tool_use": "tools: {{ tools | length }}", **others}, {})
    assert template.render(USER) == "plain"
    assert template.render(USER, [{"type": "function"}]) == "tools: 1"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content.x }}", "no element 5"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0] + 1 }}", "unsupported operand"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10**9) | list }}", "Range too big"),
    ],
)
def test_a_template_that_fails_is_a_bad_request(source: str, said: str) -> None:
    with pytest.raises(ApiError) as failure:
        render(source)
    assert failure.value.status == 400
    assert said in failure.value.message


def test_a_template_that_does_not_compile_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_the_option_is_a_file_or_a_template(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages }}")
    assert read_template_option(str(path)) == "{{ messages }}"
    assert read_template_option("{{ bos_token }}") == "{{ bos_token }}"
    with pytest.raises(ModelError, match=r"nowhere\.jinja"):
        read_template_option("nowhere.jinja")


@pytest.mark.parametrize("constant", ["'a' * 10**12", "'a' | center(10**12)", "'%1000000000000d' % 1"])
def test_constants_are_not_computed_while_a_template_is_compiled(constant: str) -> None:
    template = ChatTemplate("{% if tools %}{% set x = " + constant + " %}{{ " + constant + " }}{% endif %}.", {})
    assert template.render([]) == "."


@pytest.mark.parametrize("text", ["{% if a %}" * 5000 + "{% endif %}" * 5000, "{{ " + "(" * 5000 + ")" * 5000 + " }}"])
def test_a_template_too_deep_to_compile_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match="the chat template does not compile"):
        ChatTemplate(text, {})


@pytest.mark.parametrize(
    "endless",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_an_endless_template_ends_and_the_server_goes_on(
    start_process: StartProcess, tmp_path: Path, endless: str
) -> None:
    template = tmp_path / "endless.jinja"
    template.write_text(endless)
    seconds = {"server.chat.templates:_MAX_S": 0.3}
    server = start_process("--chat-template", str(template), environment={SECONDS: json.dumps(seconds)})
    with ThreadPoolExecutor(1) as pool:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        chat = pool.submit(server.client.post, "/v1/chat/completions", json=body)
        assert server.client.get("/health").status_code == 200
        assert chat.result().status_code == 400
        assert "takes more than 0.3 s of processor time" in chat.result().json()["error"]["message"]
    assert "rendered in threads from now on" in server.log
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


@pytest.mark.parametrize(
    ("source", "variables", "expected"),
    [
        ("{{ thinking }}", {"enable_thinking": False}, "False"),
        ("{{ enable_thinking }}", {"thinking": True}, "True"),
        ("{{ thinking }}{{ enable_thinking }}", {"thinking": True, "enable_thinking": False}, "TrueFalse"),
        # Efforts are for templates that know them, and switch thinking on or off in others.
        ("{{ enable_thinking }}", {"reasoning_effort": "high"}, "True"),
        ("{{ thinking }}", {"reasoning_effort": "none"}, "False"),
        ("{{ enable_thinking }}", {"reasoning_effort": "none", "enable_thinking": True}, "True"),
        ("{{ enable_thinking }}{{ reasoning_effort }}", {"reasoning_effort": "high"}, "Truehigh"),
        ("{{ enable_thinking }}", {}, ""),
        ("{{ messages.thinking }}", {"enable_thinking": True}, ""),
    ],
)
def test_thinking_is_switched_by_the_templates_own_name(source: str, variables: dict[str, Any], expected: str) -> None:
    assert ChatTemplate(source, {}).render([], variables=variables) == expected


QWEN_38 = (
    "{%- if reasoning_effort is defined %}{%- set resolved = reasoning_effort %}"
    "{%- if resolved not in ('xhigh', 'medium', 'low') %}{{ raise_exception('bad effort') }}{% endif %}"
    "{{ resolved }}{% endif %}{% if enable_thinking is defined and not enable_thinking %} off{% endif %}"
)
HUNYUAN_3 = (
    "{%- if not reasoning_effort is defined %}{%- set reasoning_effort = 'no_think' %}"
    "{%- elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('bad effort') }}{% endif %}"
    "{{ reasoning_effort }}"
)
KIMI_K3 = (
    "{%- if thinking is undefined %}{%- set thinking = true %}{% endif %}"
    "{%- if thinking_effort is undefined %}{%- set thinking_effort = 'max' %}{% endif %}"
    "{%- if thinking and thinking_effort not in ['low', 'medium', 'high', 'max'] %}{{ raise_exception('') }}{% endif %}"
    "{{ thinking }} {{ thinking_effort }}"
)
DEEPSEEK_V4 = (
    "{%- set thinking = enable_thinking %}{{ thinking }}"
    "{%- if thinking and reasoning_effort == 'max' %} max{% elif reasoning_effort == 'high' %} high{% endif %}"
)
SOLAR = "{%- if reasoning_effort in ['low', 'minimal'] %}off{% else %}{{ reasoning_effort }}{% endif %}"
COHERE = "{%- set t = false if reasoning_effort is defined and reasoning_effort | lower == 'none' else true %}{{ t }}"
MINIMAX_M3 = "{%- if thinking_mode == 'enabled' %}on{% elif thinking_mode == 'disabled' %}off{% endif %}"
SEED_OSS = "{%- if not thinking_budget is defined %}{%- set thinking_budget = -1 %}{% endif %}{{ thinking_budget }}"
NEMOTRON = "{{ enable_thinking }}{% if low_effort %} low{% elif medium_effort %} medium{% endif %}"
FOUR = "{%- if reasoning_effort in ('low', 'medium', 'high', 'xhigh') %}{{ reasoning_effort }}{% endif %}"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        # none, minimal, low, medium, high, xhigh, max
        (QWEN_38, (" off", "low", "low", "medium", "xhigh", "xhigh", "xhigh")),
        (HUNYUAN_3, ("no_think", "low", "low", "high", "high", "high", "high")),
        (KIMI_K3, ("False max", "True low", "True low", "True medium", "True high", "True max", "True max")),
        (DEEPSEEK_V4, ("False", "True", "True", "True", "True high", "True max", "True max")),
        (SOLAR, ("none", "off", "off", "medium", "high", "xhigh", "max")),
        (COHERE, ("False", *["True"] * 6)),
        (MINIMAX_M3, ("off", *["on"] * 6)),
        (SEED_OSS, ("0", "512", "1024", "4096", "16384", "-1", "-1")),
        (NEMOTRON, ("False", "True low", "True low", "True medium", "True", "True", "True")),
        (FOUR, ("", "low", "low", "medium", "high", "xhigh", "xhigh")),
        # Lists and values in variables, and no switch to turn thinking off.
        ("{% set ns = namespace(e='') %}{% set ns.e = reasoning_effort | default('low') %}"
         "{% set known = ['low', 'high'] %}{% if ns.e not in known %}{{ raise_exception('no') }}{% endif %}{{ ns.e }}",
         ("low", "low", "low", "high", "high", "high", "high")),
    ],
)  # fmt: skip
def test_an_effort_becomes_the_nearest_that_the_template_knows(source: str, shown: tuple[str, ...]) -> None:
    template = ChatTemplate(source, {})
    rendered = tuple(template.render([], variables={"reasoning_effort": effort}) for effort in REASONING_EFFORTS)
    assert rendered == shown


@pytest.mark.parametrize(
    ("source", "variables", "shown"),
    [
        (KIMI_K3, {"reasoning_effort": "low", "thinking_effort": "high"}, "True high"),
        (KIMI_K3, {"enable_thinking": False}, "False max"),
        (MINIMAX_M3, {"enable_thinking": True}, "on"),
        (MINIMAX_M3, {"enable_thinking": False, "thinking_mode": "enabled"}, "on"),
        (SEED_OSS, {"enable_thinking": False}, "0"),
        (SEED_OSS, {"reasoning_effort": "low", "thinking_budget": 77}, "77"),
        (QWEN_38, {"reasoning_effort": "low", "enable_thinking": False}, "low off"),
        ("{{ reasoning_effort }}", {"reasoning_effort": 0.5}, "0.5"),
        ("{{ reasoning_strength }}", {"reasoning_effort": "low"}, "low"),
        (FOUR + "{{ reasoning_effort }}", {"reasoning_effort": "vast"}, "vast"),
    ],
)
def test_what_is_given_by_the_templates_own_name_stays(source: str, variables: dict[str, Any], shown: str) -> None:
    assert ChatTemplate(source, {}).render([], variables=variables) == shown


def test_tools_are_given_by_the_templates_own_name() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = ChatTemplate("{% for tool in xml_tools or [] %}{{ tool.function.name }}{% endfor %}", {})
    assert template.render([], tools) == "f"
    assert template.render([], None) == ""
