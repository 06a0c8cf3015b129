"""What templates read: contents as texts or parts, and reasoning by its name. The user's text is never lost."""

from __future__ import annotations

from typing import Any

import pytest
from server.conftest import StartServer

from tidewheel.server.chat.template_reading import read_template

LLAVA = (
    "{% for m in messages %}{{ m['role'] | upper }}: "
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }} {% endfor %}{% endfor %}"
)
IDEFICS = (
    "{% for m in messages %}{{ m['role'] }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}"
    "{% endfor %};{% endfor %}"
)
ONE_PART = "{% for m in messages %}{{ m.role }} {{ m.content[0].text }};{% endfor %}"
RENAMED = (
    "{% for m in messages %}{% set said = m.content %}{{ m.role }} "
    "{% for piece in said[0:] %}{{ piece.text }}{% endfor %};{% endfor %}"
)
BY_MACRO = (
    "{% macro show(body) %}{% for piece in body %}{{ piece.text }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ m.role }} {{ show(m['content']) }};{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}"
    "{% else %}{% for c in m.content %}*{{ c.text }}{% endfor %}{% endif %};{% endfor %}"
)
TEXT = "{% for m in messages %}{{ m.role }} {% for p in m.content.split('|') %}{{ p }}{% endfor %};{% endfor %}"

SYSTEM = {"role": "system", "content": "Hints: say Hi."}
PARTS = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (LLAVA, "SYSTEM: Hints: say Hi. USER: Hi "),
        (IDEFICS, "system: Hints: say Hi.;user: Hi;"),
        (ONE_PART, "system Hints: say Hi.;user Hi;"),
        (RENAMED, "system Hints: say Hi.;user Hi;"),
        (BY_MACRO, "system Hints: say Hi.;user Hi;"),
        (BOTH, "system Hints: say Hi.;user Hi;"),
        (TEXT, "system Hints: say Hi.;user Hi;"),
    ],
)
def test_a_template_gets_the_form_that_it_reads(start_server: StartServer, template: str, prompt: str) -> None:
    """The model's own template, and the same one from a request."""
    own = start_server(engine={"template": template})
    other = start_server(trust_request_chat_template=True)
    body: dict[str, Any] = {"messages": [SYSTEM, {"role": "user", "content": "Hi"}]}
    for server, extra in ((own, {}), (other, {"chat_template": template})):
        response = server.post("/v1/chat/completions/render", {**body, **extra})
        assert response.status_code == 200, response.text
        told = server.post("/detokenize", {"tokens": response.json()["token_ids"]}).json()["prompt"]
        assert told == prompt


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.text }}{% endfor %} Hi, what is it that you wish to know?",
        "{{ messages[0].content }}",
    ],
)
@pytest.mark.parametrize("said", ["Hi", "What is it that you wish to know?", PARTS])
def test_a_template_that_drops_the_users_text_is_refused(
    start_server: StartServer, template: str, said: object
) -> None:
    server = start_server(engine={"template": template})
    system = {"role": "system", "content": "Hi you: What is it that you wish to know?"}
    response = server.post("/v1/chat/completions", {"messages": [system, {"role": "user", "content": said}]})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert "leaves out the last user message" in error["message"]


def test_a_template_may_write_the_text_in_its_own_way(start_server: StartServer) -> None:
    template = "{% for m in messages %}{{ (m.content | trim).replace('/no_think', '') | upper }}{% endfor %}"
    server = start_server(engine={"template": template})
    for said in ("say something /no_think", " hi ", "Hi\r\n"):
        body = {"messages": [{"role": "user", "content": said}], "max_tokens": 1}
        assert server.post("/v1/chat/completions", body).status_code == 200


FIELD = "{% for m in messages %}{{ m.role }} {{ m.FIELD }}|{{ m.content }};{% endfor %}"
MINISTRAL = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for b in m.content %}{% if b['type'] == 'thinking' %}[THINK]{{ b['thinking'] }}[/THINK]{% else %}"
    "{{ b['text'] }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
APERTUS = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for b in m.content.blocks %}{% if b.type == 'thoughts' %}<{{ b.text }}>{% elif b.type == 'response' %}"
    "{{ b.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    ("template", "shown"),
    [
        *(
            (FIELD.replace("FIELD", field), "why|Yes")
            for field in ("reasoning_content", "reasoning", "thinking", "tool_plan")
        ),
        (FIELD.replace("m.FIELD", "m.get('thoughts')"), "why|Yes"),
        (
            "{% for m in messages %}{{ m.role }} {{ m['reasoning'] or m.thinking }}|{{ m.content }};{% endfor %}",
            "why|Yes",
        ),
        (MINISTRAL, "[THINK]why[/THINK]Yes"),
        (APERTUS, "<why>Yes"),
    ],
)
def test_reasoning_reaches_a_template_by_its_name(
    start_server: StartServer, template: str, shown: str, name: str
) -> None:
    server = start_server(engine={"template": template})
    messages = [
        {"role": "user", "content": "Is it so?"},
        {"role": "assistant", "content": "Yes", name: "why"},
        {"role": "user", "content": "And why is it so?"},
    ]
    response = server.post("/v1/chat/completions/render", {"messages": messages})
    assert response.status_code == 200, response.text
    text = server.post("/detokenize", {"tokens": response.json()["token_ids"]}).json()["prompt"]
    assert f"assistant {shown};" in text


@pytest.mark.parametrize("template", ["{% for", "{{ " + "(" * 5000 + "}}", "{{ " + "a." * 5000 + "content }}"])
def test_a_broken_template_is_read_as_one_of_texts(template: str) -> None:
    assert not read_template(template).parts
