"""Structured output over HTTP: every way to ask for it, on models that would never do it of their own accord."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Literal

import httpx
import jsonschema
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import sample, swept
from server.conftest import RunningServer, ServerProcess, StartServer, events

pytest.importorskip("llguidance")  # not there on every machine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "Describe yourself."}]}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
LARK = 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/'
EBNF = 'root ::= number ("+" number)*\nnumber ::= [0-9] [0-9]? [0-9]?\n'


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def validates(schema: Any) -> Callable[[str], bool]:
    return lambda text: jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


NUMBERS = matches(r"[0-9]{1,3}(\+[0-9]{1,3})*")
TIDES = {"guided_choice": ["ebb", "ebb tide", 'the "flood"']}
TAG = {"type": "tag", "begin": "<tide>", "content": {"type": "regex", "pattern": "[a-f]{2,8}"}, "end": "</tide>"}
OLD_TAG = {"begin": "<size>", "schema": {"type": "integer", "minimum": 0, "maximum": 9}, "end": "</size>"}
TAGGED, TRIGGERED = matches("<tide>[a-f]{2,8}</tide>"), matches("(?s)((?!<size).)*(<size>[0-9]</size>((?!<size).)*)*")
KINDS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"response_format": {"type": "json_object"}}, validates({"type": "object"})),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, validates(SCHEMA)),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, validates(SCHEMA)),
    ({"response_format": json_schema(SCHEMA, strict=True)}, validates(SCHEMA)),
    ({"response_format": json_schema(SCHEMA, strict=False, description="of you")}, validates(SCHEMA)),
    ({"response_format": {"type": "text"}, "guided_json": SCHEMA}, validates(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "guidance"}, validates(SCHEMA)),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " {0,2}"}, lambda text: "\n" not in text),
    ({"guided_regex": "[a-f]{2,8}"}, matches("[a-f]{2,8}")),
    (TIDES, matches('ebb|ebb tide|the "flood"')),
    ({"guided_grammar": LARK}, NUMBERS),
    ({"guided_grammar": EBNF, "guided_decoding_backend": "auto"}, NUMBERS),
    ({"guided_grammar": EBNF, "guided_decoding_backend": "outlines"}, NUMBERS),
    ({"structured_outputs": {"json": SCHEMA}}, validates(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, matches(r'\{"name":".*\}')),
    ({"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}}, validates({"type": "object"})),
    ({"structured_outputs": {"regex": "(tide )+"}}, matches("(tide )+")),
    ({"structured_outputs": {"choice": ["yes", "no"], "disable_fallback": True}}, matches("yes|no")),
    ({"structured_outputs": {"grammar": LARK, "disable_additional_properties": False}}, NUMBERS),
    ({"response_format": {"type": "structural_tag", "format": TAG}}, TAGGED),
    ({"response_format": {"type": "structural_tag", "structures": [OLD_TAG], "triggers": ["<size"]}}, TRIGGERED),
    ({"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})}}, TAGGED),
]


def name_of(case: Any) -> str:
    return json.dumps(case)[:60] if isinstance(case, dict) else ""


@pytest.mark.parametrize(("fields", "is_right"), sample(KINDS, lambda kind: KINDS.index(kind) % 2 == 0), ids=name_of)
def test_every_way_to_ask(
    demo_server: ServerProcess, dummy_server: ServerProcess, fields: dict[str, Any], is_right: Callable[[str], bool]
) -> None:
    """On the embedded model and on random weights; an answer that stops is right, and some do stop."""
    stopped = 0
    sampling = {"max_tokens": 120, "n": 2, "temperature": 0.9, "seed": 5}
    for process, path, prompt in ((demo_server, CHAT, ASK), (dummy_server, COMPLETIONS, {"prompt": "I am"})):
        headers = {"authorization": "Bearer secret"}
        body = {**prompt, **sampling, **fields}
        response = httpx.post(process.url + path, json=body, timeout=60, trust_env=False, headers=headers)
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            if choice["finish_reason"] == "stop":
                text = choice["message"]["content"] if path == CHAT else choice["text"]
                assert is_right(text), text
                assert choice["stop_reason"] is None
                stopped += 1
    assert stopped


def test_a_stream_and_a_whole_answer_are_the_same(demo_server: ServerProcess) -> None:
    body = {**ASK, "response_format": json_schema(SCHEMA), "seed": 3, "temperature": 1.0}
    with httpx.Client(base_url=demo_server.url, timeout=60, trust_env=False) as http:
        whole = http.post(CHAT, json=body).json()["choices"][0]
        chunks = events(http.post(CHAT, json={**body, "stream": True}))
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)


class Wheel(pydantic.BaseModel):
    spokes: int
    material: Literal["oak", "iron"]


class Mill(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    wheels: list[Wheel] = pydantic.Field(max_length=2)
    grinds: bool | None


def test_openai_parses_into_a_model(demo_server: ServerProcess) -> None:
    import openai

    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0) as client:
        completion = client.chat.completions.parse(
            model="tidewheel-demo",
            messages=[{"role": "user", "content": "Invent a mill."}],
            response_format=Mill,
            temperature=0.7,
            seed=1,
        )
        mill = completion.choices[0].message.parsed
        assert isinstance(mill, Mill)
        assert completion.choices[0].finish_reason == "stop"
        with client.chat.completions.stream(
            model="tidewheel-demo",
            messages=[{"role": "user", "content": "Invent a mill."}],
            response_format=Mill,
            temperature=0.7,
            seed=1,
        ) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == mill


def test_many_at_once_get_what_each_gets_alone(dummy_server: ServerProcess) -> None:
    bodies = [
        {**ASK, **fields, "max_tokens": 30, "temperature": 0.8, "seed": 1, "logprobs": True} for fields, _ in KINDS
    ]

    def answer(response: httpx.Response) -> Any:
        choice = response.json()["choices"][0]
        return choice["message"], choice["finish_reason"], choice["logprobs"]

    async def ask(at_once: int) -> list[Any]:
        limit = asyncio.Semaphore(at_once)
        headers = {"authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=dummy_server.url, timeout=60, trust_env=False, headers=headers) as http:

            async def one(body: Any) -> Any:
                async with limit:
                    return answer(await http.post(CHAT, json=body))

            return list(await asyncio.gather(*map(one, bodies)))

    assert asyncio.run(ask(at_once=len(bodies))) == asyncio.run(ask(at_once=1))


_values = st.sampled_from([1, "ebb", 'a"b\\', None, True, 2.5])
_strings = st.fixed_dictionaries(
    {"type": st.just("string"), "maxLength": st.integers(1, 6)}, optional={"minLength": st.integers(0, 1)}
) | st.sampled_from([{"type": "string", "pattern": "^[a-c]{2,5}$"}, {"type": "string", "format": "uuid"}])
_integers = st.builds(
    lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
    st.integers(-200, 200),
    st.integers(0, 99),
)
_leaves = (
    _strings
    | _integers
    | st.sampled_from([{"type": "number", "minimum": -1, "maximum": 1}, {"type": "boolean"}, {"type": "null"}])
    | st.just({"$ref": "#/$defs/tide"})
    | _values.map(lambda value: {"const": value})
    | st.lists(_values, min_size=1, max_size=3, unique_by=repr).map(lambda values: {"enum": values})
)


def _object(parts: dict[str, Any], required: int) -> dict[str, Any]:
    return {"type": "object", "properties": parts, "required": list(parts)[:required], "additionalProperties": False}


_schemas = st.recursive(
    _leaves,
    lambda parts: (
        st.builds(
            _object, st.dictionaries(st.sampled_from(["a", "b c", 'd"', "é"]), parts, max_size=3), st.integers(0, 3)
        )
        | st.builds(lambda part, n: {"type": "array", "items": part, "maxItems": n}, parts, st.integers(0, 2))
        | st.lists(parts, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    ),
    max_leaves=6,
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(_schemas, st.integers(0, 2**32))
def test_an_answer_validates_against_any_schema(dummy_server: ServerProcess, schema: dict[str, Any], seed: int) -> None:
    schema = {**schema, "$defs": {"tide": {"enum": ["ebb", "flood"]}}}
    body = {**ASK, "response_format": json_schema(schema), "max_tokens": 200, "temperature": 0.7, "seed": seed, "n": 2}
    headers = {"authorization": "Bearer secret"}
    response = httpx.post(dummy_server.url + CHAT, json=body, timeout=60, trust_env=False, headers=headers)
    assert response.status_code == 200, response.text
    for choice in response.json()["choices"]:
        if choice["finish_reason"] == "stop":
            validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
            validator.validate(json.loads(choice["message"]["content"]))


@pytest.mark.parametrize("parallel", [True, swept(False)])
def test_demanded_calls_have_valid_arguments(
    demo_server: ServerProcess, dummy_server: ServerProcess, parallel: bool
) -> None:
    """Also where the answer may not match what the request asks of answers: calls are no answers."""
    mill = {**SCHEMA, "properties": {**SCHEMA["properties"], "flow": {"$ref": "#/$defs/flow"}},
            "$defs": {"flow": {"enum": ["ebb", "flood"]}}}  # fmt: skip
    parameters = {"describe": SCHEMA, "mill": mill, "now": None}
    tools = [
        {"type": "function", "function": {"name": name, **({"parameters": schema} if schema else {})}}
        for name, schema in parameters.items()
    ]
    named = {"type": "function", "function": {"name": "mill"}}
    called = 0
    for process in (demo_server, dummy_server):
        for choice in ("required", named):
            body = {**ASK, "tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel, "max_tokens": 250,
                    "n": 4, "temperature": 0.8, "seed": 2, "response_format": {"type": "json_object"}}  # fmt: skip
            headers = {"authorization": "Bearer secret"}
            response = httpx.post(process.url + CHAT, json=body, timeout=60, trust_env=False, headers=headers)
            assert response.status_code == 200, response.text
            for answer in response.json()["choices"]:
                if answer["finish_reason"] == "length":
                    continue
                assert answer["finish_reason"] == ("stop" if choice == named else "tool_calls")
                assert answer["message"]["content"] is None
                calls = [call["function"] for call in answer["message"]["tool_calls"]]
                assert calls
                assert parallel or len(calls) == 1
                for call in calls:
                    assert choice == "required" or call["name"] == "mill"
                    schema = parameters[call["name"]] or {"type": "object"}
                    jsonschema.validate(json.loads(call["arguments"]), schema)
                    called += 1
    assert called


@pytest.mark.parametrize(
    "fields", [{"response_format": json_schema({"const": "tide"})}, swept({"guided_choice": ['"tide"']})]
)
def test_reasoning_is_free_and_what_follows_it_matches(start_server: StartServer, fields: dict[str, Any]) -> None:
    specials = ["<think>", "</think>"]
    server = start_server({"specials": specials}, reasoning_parser="qwen3")
    spelt = start_server({}, reasoning_parser="deepseek_r1")  # which always reasons; its tags are several tokens here
    for reciter, said in (
        (server, '<think>{"no": JSON\n</think>"tide"'),
        (server, '"tide"'),
        (spelt, 'so, </thin not yet</think>"tide"'),
    ):
        body = {"messages": [{"role": "user", "content": f"SAY({said})YAS"}], **fields}
        message = reciter.post(CHAT, body).json()["choices"][0]["message"]
        assert message["content"] == '"tide"'
        assert bool(message.get("reasoning_content")) == ("</think>" in said)
    broken = {"messages": [{"role": "user", "content": "SAY(<think>hm</think>no)YAS"}], **fields}
    assert server.post(CHAT, broken).status_code == 500


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {}}, "response_format.type", "required"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "goes only with"),
    ({"response_format": {"type": "json_object", "schema": {"type": "x"}}}, "response_format.schema", "x"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format", "structures and triggers"),
    ({"response_format": {"type": "structural_tag", "triggers": ["<"]}}, "response_format.format", "must have"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "token"}}},
     "response_format.format.type", "token"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "or", "elements": [{"type": "regex"}]}}},
     "response_format.format.elements[0].pattern", "required"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "("}}},
     "response_format.format", "unclosed"),
    ({"response_format": {"type": "json_object", "triggers": []}}, "response_format.triggers", "structural_tag"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
     "response_format.json_schema", "only with"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
     "response_format.json_schema.name", "required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
     "response_format.json_schema.name", "letters"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
     "response_format.json_schema.schema", "required"),
    ({"response_format": json_schema({}, strict="yes")}, "response_format.json_schema.strict", "bool"),
    ({"response_format": json_schema({}, stric=True)}, "response_format.json_schema.stric", "unknown"),
    ({"response_format": json_schema({"properties": {"a": {"type": "objekt"}}})},
     "response_format.json_schema.schema", "objekt (at /properties/a)"),
    ({"guided_json": "{"}, "guided_json", "not a JSON schema"),
    ({"guided_json": "[]"}, "guided_json", "not a JSON schema"),
    ({"guided_json": {"not": {}}}, "guided_json", "not"),
    ({"guided_regex": "("}, "guided_regex", "unclosed"),
    ({"guided_regex": ""}, "guided_regex", "empty"),
    ({"guided_choice": []}, "guided_choice", "empty"),
    ({"guided_choice": [1]}, "guided_choice[0]", "str"),
    ({"guided_grammar": "start: a"}, "guided_grammar", "unknown name"),
    ({"guided_grammar": "root ::= a"}, "guided_grammar", "not found"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
    ({"guided_json": {}, "guided_whitespace_pattern": "("}, "guided_json", "unclosed"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "guided_json and guided_regex"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
     "structured_outputs.regex", "response_format and structured_outputs.regex"),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "structured_outputs.choice", "json"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
     "structured_outputs.whitespace_pattern", "json"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
     "structured_outputs.whitespace_pattern", "both"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties", "additionalProperties"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not a structural tag"),
    ({"structured_outputs": {"structural_tag": '{"type": "structural_tag"}'}},
     "structured_outputs.structural_tag", "must have a format"),
    ({"structured_outputs": {"structural_tag": '{"type": "text"}'}}, "structured_outputs.structural_tag", "must be"),
    ({"guided_regex": "a" * 300_000}, "guided_regex", "262144"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), BAD, ids=name_of)
def test_what_is_wrong_is_said(server: RunningServer, fields: dict[str, Any], param: str, words: str) -> None:
    for path, prompt in ((CHAT, ASK), (COMPLETIONS, {"prompt": "a"})):
        for stream in (False, True):
            response = server.post(path, {**prompt, **fields, "stream": stream})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param
            assert words in error["message"]
            assert error["type"] == "invalid_request_error"


def test_the_last_token_of_a_complete_grammar_is_shown(server: RunningServer) -> None:
    """The grammar ends the answer where its own end would come next; a stop string in it still cuts it."""
    for said, fields, shown in (
        ('{"a": [1]}', {"response_format": {"type": "json_object"}}, '{"a": [1]}'),
        ('{"a": [1]} and more', {"response_format": {"type": "json_object"}}, '{"a": [1]}'),
        ("ebb", {"guided_choice": ["ebb", "flood"]}, "ebb"),
        ("ebb", {"guided_choice": ["ebb", "ebb tide"]}, "ebb"),
        ("ebb", {"guided_choice": ["ebb", "flood"], "stop": ["b"]}, "e"),
        ("ebb", {"guided_choice": ["ebb", "flood"], "stop": ["x"], "ignore_eos": True, "min_tokens": 9}, "ebb"),
        ("ebb", {"guided_choice": ["ebb", "flood"], "max_tokens": 2}, "eb"),
    ):
        body = {"prompt": f"SAY({said})YAS", "max_tokens": 99, **fields}
        choice = server.post(COMPLETIONS, body).json()["choices"][0]
        assert choice["text"] == shown
        assert choice["finish_reason"] == ("length" if shown == "eb" else "stop")
        chunks = events(server.post(COMPLETIONS, {**body, "stream": True}))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == shown


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": json_schema(SCHEMA)}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"allowed_token_ids": [97]}, "allowed_token_ids"),
        ({"bad_words": ["ebb"]}, "bad_words"),
    ],
    ids=name_of,
)
def test_a_beam_search_refuses_constraints_by_name(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    for path, prompt in ((CHAT, ASK), (COMPLETIONS, {"prompt": "a"})):
        response = server.post(path, {**prompt, **fields, "use_beam_search": True, "n": 2, "max_tokens": 3})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert "left out with beam search" in error["message"]
    neutral = {"response_format": {"type": "text"}, "bad_words": []}
    body = {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 3, **neutral}
    assert server.post(COMPLETIONS, body).status_code == 200


def test_choices_match_each_on_its_own(demo_server: ServerProcess) -> None:
    """Three answers to one prompt, alike whole and streamed, and the best of more."""
    body = {**ASK, "response_format": json_schema(SCHEMA), "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 200}
    with httpx.Client(base_url=demo_server.url, timeout=60, trust_env=False) as http:
        choices = http.post(CHAT, json=body).json()["choices"]
        streamed = ["", "", ""]
        for chunk in events(http.post(CHAT, json={**body, "stream": True})):
            for choice in chunk["choices"]:
                streamed[choice["index"]] += choice["delta"].get("content", "")
        best = http.post(
            COMPLETIONS,
            json={"prompt": "I am", "guided_json": SCHEMA, "n": 2, "best_of": 3, "max_tokens": 200, "echo": True,
                  "seed": 7, "prompt_logprobs": 0},
        ).json()["choices"]  # fmt: skip
    texts = [choice["message"]["content"] for choice in choices]
    assert texts == streamed
    assert len(set(texts)) == 3
    texts += [choice["text"].removeprefix("I am") for choice in best]
    reasons = [choice["finish_reason"] for choice in [*choices, *best]]
    assert reasons.count("stop") >= 3
    for text, reason in zip(texts, reasons, strict=True):
        if reason == "stop":
            jsonschema.validate(json.loads(text), SCHEMA)


def test_a_device_that_does_not_keep_to_the_grammar_fails_that_request_alone(server: RunningServer) -> None:
    response = server.post(COMPLETIONS, {"prompt": "SAY(tide)YAS", "guided_regex": "ti[0-9]"})
    assert response.status_code == 500
    assert "grammar cannot be followed" in response.json()["error"]["message"]
    assert server.post(COMPLETIONS, {"prompt": "SAY(tide)YAS"}).json()["choices"][0]["text"] == "tide"


def test_allowed_tokens_and_bad_words(demo_server: ServerProcess) -> None:
    with httpx.Client(base_url=demo_server.url, timeout=60, trust_env=False) as http:

        def ask(**fields: Any) -> str:
            body = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 40}
            content: str = http.post(CHAT, json={**body, **fields}).json()["choices"][0]["message"]["content"]
            return content

        plain = ask()
        words = [word for word in ("Tidewheel", "model", "small", "CPU", "language") if word in plain]
        assert len(words) >= 2
        assert not any(word in ask(bad_words=words) for word in words)
        allowed = http.post("/tokenize", json={"prompt": "ebb and flood"}).json()["tokens"]
        told = ask(allowed_token_ids=allowed)
        assert set(http.post("/tokenize", json={"prompt": told}).json()["tokens"]) <= set(allowed)
        first = http.post("/tokenize", json={"prompt": "ebb"}).json()["tokens"][:1]
        beginning = http.post("/detokenize", json={"tokens": first}).json()["prompt"]
        assert ask(guided_choice=["ebb", "flood"], bad_words=[beginning]) == "flood"
