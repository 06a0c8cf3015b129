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
    others = {str(number): "{% if %}" for number in range(3)}  # never compiled, as nobody asks for them
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
        ("{{ enable_thinking }}{{ reasoning_effort }}", {"reasoning_effort": "high"}, "high"),
        ("{{ enable_thinking }}", {}, ""),
        ("{{ messages.thinking }}", {"enable_thinking": True}, ""),
    ],
)
def test_thinking_is_switched_by_the_templates_own_name(source: str, variables: dict[str, Any], expected: str) -> None:
    assert ChatTemplate(source, {}).render([], variables=variables) == expected


def test_tools_are_given_by_the_templates_own_name() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = ChatTemplate("{% for tool in xml_tools or [] %}{{ tool.function.name }}{% endfor %}", {})
    assert template.render([], tools) == "f"
    assert template.render([], None) == ""
