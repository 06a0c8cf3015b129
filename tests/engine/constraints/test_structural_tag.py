"""Structural tags: each format takes what it describes and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine.constraints.grammars import grammar
from engine.tiny_tokenizers import tiny

from tidewheel.engine.constraints.grammar import Grammar
from tidewheel.engine.errors import InvalidRequestError

pytest.importorskip("llguidance")  # not there on every machine

NUMBER = {"type": "regex", "pattern": "[0-9]{1,3}"}
OBJECT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
SCHEMA = {"type": "json_schema", "json_schema": OBJECT}
TEXT = {"type": "any_text"}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TAGS = [tag("<f=a>", SCHEMA, "</f>"), {"begin": "<f=b>", "content": NUMBER, "end": "</f>"}]
A, B = '<f=a>{"n": 1}</f>', "<f=b>12</f>"
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "separator": "; ", "tags": TAGS}
QWEN = {
    "type": "qwen_xml_parameter",
    "json_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "kind": {"type": "string", "enum": ["ebb", "flood"]},
            "n": {"$ref": "#/$defs/count"},
            "tree": {"type": "object", "properties": {"left": {"$ref": "#/properties/tree"}},
                     "additionalProperties": False},
        },
        "required": ["city", "n"],
        "$defs": {"count": {"type": "integer"}},
    },
}  # fmt: skip
CITY, COUNT = "<parameter=city>\nAlt </p> Ö\n</parameter>\n", "<parameter=n>\n12\n</parameter>"


def compiled(wanted: Any) -> Grammar:
    return grammar("structural_tag", json.dumps(wanted))


def is_taken(wanted: Any, text: str) -> bool:
    matcher = compiled(wanted).new_matcher()
    tokens = tiny("byte-level").encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("wanted", "taken", "refused"),
    [
        (const('a "b"\n\\ü😀'), ['a "b"\n\\ü😀'], ["", "a"]),
        (NUMBER, ["1", "123"], ["", "1234", "a"]),
        (SCHEMA, ['{"n": 1}', '{\n  "n": 1}'], ["{}"]),
        ({"type": "grammar", "grammar": 'root ::= "a" | "b"'}, ["a", "b"], ["c"]),
        (TEXT, ["", "anything\n<f="], []),
        (sequence(const("a"), NUMBER, TEXT), ["a1", "a1 and more"], ["1", "ab"]),
        (sequence(), [""], ["a"]),
        ({"type": "or", "elements": [SCHEMA, NUMBER, const("no")]}, ['{"n":1}', "12", "no"], ["", "yes"]),
        (tag("<a>", NUMBER, "</a>"), ["<a>1</a>"], ["<a>1", "<a></a>"]),
        (tag("<a>", TEXT, "</a>"), ["<a></a>", "<a>x</b>ü</a>"], ["<a>x", "<a></a></a>"]),
        (sequence(tag("<a>", TEXT, "</a>"), NUMBER), ["<a>x</a>1"], ["<a>x1"]),
        (tag("<|late|>", TEXT, "<|late|>"), ["<|late|>a<|late|>"], ["<|late|>", "a"]),
        (tag("a", TEXT, ""), ["a", "abc"], ["b"]),
        (TRIGGERED, ["", "text", A, f"so {A} and {B}", f"{B}{B} <f"], ["<f=c>", f"{A}<f=b>"]),
        ({**TRIGGERED, "stop_after_first": True}, ["", "text", f"so {A}"], [f"{A} "]),
        ({**TRIGGERED, "at_least_one": True}, [A, f"{B} then {A}."], ["", "text", f" {A}"]),
        ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, [A, B], ["", f"{A}{B}", f" {A}"]),
        ({**TRIGGERED, "triggers": ["<|late|>"], "tags": [tag("<|late|>call", NUMBER, "")]},
         ["", "a", "so <|late|>call12", "<|late|>call1<|late|>call2"], ["<|late|>"]),
        (SEPARATED, ["", A, f"{A}; {B}; {B}; {B}"], [f"{A}{B}", f"{A}; "]),
        ({**SEPARATED, "at_least_one": True}, [A], [""]),
        ({**SEPARATED, "stop_after_first": True}, ["", B], [f"{A}; {B}"]),
        ({**SEPARATED, "at_most": 2}, [A, f"{A}; {B}"], [f"{A}; {B}; {B}"]),
        (QWEN, [CITY + COUNT, f"{CITY}<parameter=kind>ebb</parameter>{COUNT}",
                CITY + COUNT + '<parameter=tree>{"left": {"left": {}}}</parameter>'],
         [CITY, COUNT, f"{CITY}<parameter=kind>slack</parameter>{COUNT}", CITY + "<parameter=n>one</parameter>"]),
        ({"type": "qwen_xml_parameter", "json_schema": {"type": "object"}}, [""], ["a"]),
    ],
)  # fmt: skip
def test_what_each_format_takes(wanted: Any, taken: list[str], refused: list[str]) -> None:
    for text in taken:
        assert is_taken(wanted, text), text
    for text in refused:
        assert not is_taken(wanted, text), text


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (sequence(TEXT, NUMBER), "any_text and triggered_tags must come last"),
        (tag("<a>", TRIGGERED, "</a>"), "any_text and triggered_tags must come last"),
        ({**TRIGGERED, "triggers": ["<g="]}, "begins with none of the triggers"),
        ({**TRIGGERED, "triggers": [""]}, "begins with none of the triggers"),
        ({**TRIGGERED, "tags": []}, "at least one tag"),
        ({**SEPARATED, "tags": []}, "at least one tag"),
        ({"type": "or", "elements": []}, "at least one tag or element"),
        (sequence(const("a"), {"type": "regex", "pattern": "("}), "unclosed"),
        ({"type": "qwen_xml_parameter", "json_schema": {"properties": []}}, "must be an object"),
        ({"type": "qwen_xml_parameter", "json_schema": {"required": 1}}, "must be an object"),
        ({"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": {"type": "string", "enum": [1]}}}},
         "at least one"),
        ({"type": "qwen_xml_parameter", "json_schema": {"properties": {"a": {"type": ["objekt"]}}}}, "objekt"),
        ({"type": "json_schema", "json_schema": {"x-guidance": 1}}, "x-guidance"),
        (sequence(NUMBER, {"type": "json_schema", "json_schema": {"properties": {"a": {"type": "objekt"}}}}),
         "objekt (at /elements/1/json_schema/properties/a)"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_said(wanted: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        compiled(wanted)
    assert words in str(refusal.value)
