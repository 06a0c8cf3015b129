"""Grammars that were sent to hurt the server: each is answered, and the server goes on as if nothing had been."""

from __future__ import annotations

import json
import signal
import threading
from typing import Any

import httpx
import pytest
from samples import sample
from server.conftest import ServerProcess
from server.waiting import eventually

pytest.importorskip("llguidance")  # not there on every machine

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16}
SLOW = "start: " + "|".join(['"a"'] * 60_000)


def chain(count: int, kind: str = "object") -> dict[str, Any]:
    """Definitions that each refer to the next."""

    def part(ref: dict[str, Any]) -> dict[str, Any]:
        return {
            "object": {"type": "object", "properties": {"a": ref}},
            "array": {"type": "array", "items": ref},
            "allOf": {"allOf": [ref]},
            "ref": ref,
        }[kind]

    named = {f"d{i}": part({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**named, f"d{count}": {"type": "string"}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def answer_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def tool(schema: dict[str, Any], choice: Any = "required") -> dict[str, Any]:
    return {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": choice,
    }


def tag(content: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "structural_tag", "format": content}}


def deep_tag(depth: int) -> dict[str, Any]:
    content: dict[str, Any] = {"type": "any_text"}
    for _ in range(depth):
        content = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    return tag(content)


NAMED = {"type": "function", "function": {"name": "f"}}
RULES = "start: r0\n" + "\n".join(f'r{i}: r{i + 1} "a"' for i in range(2800))
EBNF = "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(8000))
OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "objects": (answer_of(chain(1000)), "256 definitions"),
    "arrays": (answer_of(chain(2600, "array")), "256 definitions"),
    "allOf": (answer_of(chain(2600, "allOf")), "256 definitions"),
    "references": (answer_of(chain(2600, "ref")), "256 definitions"),
    "nested": (answer_of(nested(200)), "100 levels of objects and lists"),
    "guided": ({"guided_json": json.dumps(chain(1000))}, "256 definitions"),
    "tool": (tool(chain(1000)), "256 definitions"),
    "named tool": (tool(chain(1000), NAMED), "256 definitions"),
    "nested tool": (tool(nested(200)), "100 levels of objects and lists"),
    "hidden": ({"guided_grammar": "start: %json " + json.dumps(chain(1000))}, "4 MiB of stack"),
    "hidden in a tag": (
        tag({"type": "grammar", "grammar": "start: %json " + json.dumps(chain(1000))}),
        "4 MiB of stack",
    ),
    "tags": (deep_tag(110), "100 levels of objects and lists"),
    "rules": ({"guided_grammar": RULES}, "256 rules"),
    "ebnf": ({"guided_grammar": EBNF}, "256 rules"),
    "groups": ({"guided_regex": "(" * 5000 + "a" + ")" * 5000}, "100 levels of groups"),
    "choices": ({"guided_choice": [f"c{i}" for i in range(10_001)]}, "at most 10000"),
    "properties": (answer_of(OPTIONAL), "at most 2000"),
    "large": (answer_of({f"p{i}": {} for i in range(60_000)}), "262144"),
    "repetition": ({"guided_regex": "a{1000000}"}, "200000|256 MiB|2 s|10 s"),
    "rule repetition": ({"guided_grammar": 'start: ("a" "b"){100000}'}, "more than 20000 steps"),
    "symbols": ({"guided_grammar": "start: " + '"a"?' * 50_000}, "65525|2 s|10 s"),
}

# One of each limit.
FEW = ("objects", "nested tool", "hidden", "rules", "groups", "choices", "properties", "large", "rule repetition")


def health(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/health", trust_env=False, timeout=30).status_code == 200


def ask(server: ServerProcess, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + CHAT, json={**ASK, **fields}, trust_env=False, timeout=60)


@pytest.mark.parametrize("name", sample(ATTACKS, FEW.__contains__))
def test_an_attack_is_refused_with_its_limit_and_hurts_nobody(demo_server: ServerProcess, name: str) -> None:
    body, limit = ATTACKS[name]
    response = ask(demo_server, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert any(words in error["message"] for words in limit.split("|")), error["message"]
    assert error["param"] in (*body, "tools", "response_format.json_schema.schema", "response_format.format",
                              "tools[0].function.parameters"), error  # fmt: skip
    health(demo_server)
    honest = ask(demo_server, guided_regex=f"{name} [a-f]{{2}}")
    assert honest.status_code == 200, honest.text
    assert honest.json()["choices"][0]["message"]["content"].startswith(f"{name} ")


def test_references_in_circles_are_read_once(demo_server: ServerProcess) -> None:
    """A schema of 1 KB, whose types took the time of 30 to the power of 16."""
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 30}},
    }
    content = {"type": "qwen_xml_parameter", "json_schema": schema}
    assert ask(demo_server, **tag(content)).status_code == 200
    health(demo_server)


def test_many_choices(demo_server: ServerProcess) -> None:
    choices = [f"choice {i * 7919}" for i in range(10_000)]
    response = ask(demo_server, guided_choice=choices, max_tokens=64)
    assert response.json()["choices"][0]["message"]["content"] in choices


def test_a_schema_of_400_properties(demo_server: ServerProcess) -> None:
    schema = {**OPTIONAL, "properties": dict(list(OPTIONAL["properties"].items())[:400])}  # type: ignore[attr-defined]
    assert ask(demo_server, **answer_of(schema)).status_code == 200


# A mask may take a second.
def test_an_ambiguous_grammar_ends_its_own_request_only(demo_server: ServerProcess) -> None:
    """Each of its masks takes longer than the one before, up to a second."""
    ambiguous = 'start: e\ne: e e e | e e | "a" | "b" | e "a" e | e "b" e e'
    alone = ask(demo_server, guided_regex="[a-f ]{30}", max_tokens=30, seed=4).json()["choices"]
    answers: list[httpx.Response] = []

    def attack(seed: int) -> None:
        fields = {"guided_grammar": ambiguous, "max_tokens": 900, "temperature": 1.5, "ignore_eos": True}
        answers.append(ask(demo_server, **fields, seed=seed))

    attackers = [threading.Thread(target=attack, args=(seed,)) for seed in range(2)]
    for attacker in attackers:
        attacker.start()
    assert ask(demo_server, guided_regex="[a-f ]{30}", max_tokens=30, seed=4).json()["choices"] == alone
    for attacker in attackers:
        attacker.join(120)
    assert len(answers) == 2
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert "too ambiguous" in answer.json()["error"]["message"]
    health(demo_server)


# A server starts, and a process that compiles.
@pytest.mark.sweep
def test_sigterm_ends_the_server_while_grammars_are_compiled() -> None:
    server = ServerProcess()
    try:
        answers: list[int] = []

        def attack(name: int) -> None:
            answers.append(ask(server, guided_grammar=f'{SLOW}|"{name}"').status_code)

        attackers = [threading.Thread(target=attack, args=(name,), daemon=True) for name in range(3)]
        for attacker in attackers:
            attacker.start()
        eventually(lambda: 429 in answers, "two are not compiled")  # for the third there is no room
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        for attacker in attackers:
            attacker.join(20)
        assert set(answers) <= {400, 429, 503}
    finally:
        server.stop()
