"""Harnesses of what is done with grammars before llguidance reads them. Nothing here may recurse without a bound."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
from fuzz.harness import Harness, written

from tidewheel.engine.constraints.depth import (
    MAX_NESTING,
    check_nesting,
    check_regex,
    check_rules,
    check_schema,
    nesting,
)
from tidewheel.engine.constraints.json_schema import failing_part, json_types, part_of, relocated
from tidewheel.engine.constraints.source import choice_rules, is_ebnf
from tidewheel.engine.constraints.structural_tag import compose, decode_format, schemas_in

SCHEMA: dict[str, Any] = {
    "type": "object", "required": ["a"], "additionalProperties": False,
    "properties": {"a": {"$ref": "#/$defs/b"}, "c/~": {"anyOf": [{"type": ["string", "null"]}, {"enum": [1, "x"]}]},
                   "d": {"type": "array", "prefixItems": [{"const": 2.5}], "items": {"$ref": "#"}}},
    "$defs": {"b": {"allOf": [{"$ref": "#/properties/c~1~0"}, {"properties": {}, "examples": [{"$ref": "#/x"}]}]}},
}  # fmt: skip
# References to what is no part of the schema.
NO_PARTS = {"type": "object", "properties": {"a": {"$ref": "object"}, "b": {"$ref": "#c"}, "d": {"$ref": "http://e/f"}}}
TAGGED: dict[str, Any] = {"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"}
TAGS: list[dict[str, Any]] = [
    {"type": "sequence", "elements": [
        {"type": "const_string", "value": "a<|x|>"}, {"type": "regex", "pattern": "(a|[)(])+"},
        {"type": "or", "elements": [TAGGED, {"type": "grammar", "grammar": "start: /a/"}]},
        {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAGGED], "at_least_one": True}]},
    {"type": "tags_with_separator", "tags": [{**TAGGED, "content": {"type": "qwen_xml_parameter",
                                                                    "json_schema": SCHEMA}}],
     "separator": ",", "at_most": 3},
    {"type": "json_schema", "json_schema": SCHEMA},
]  # fmt: skip
RULES = [
    'start: (A | b)* ["x" c]\nA: /[a-z(]+/i\n?b.2: "(" b ")" | c // no (\nc[suffix="a"]: %json {"a": []}',
    'root ::= (a | "b\\"(")* [^)\\]]+ # (\na ::= "x" root? |\n  [(] a-b\n a-b ::= root{2,3}',
    r"^(a|\(|[^)(\]]|[]a])+(?:b{2,3}|(?i)c)$",
]


def part_source(kind: str, value: Any) -> str:
    """Stands for llguidance's grammar of a part."""
    if kind == "json_schema":
        check_schema(value)
        return json.dumps({"grammars": [{"json_schema": value}]})
    (check_regex if kind == "regex" else check_rules)(value)
    return "start: /a/"


def schema(data: bytes) -> None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    assert nesting(value) <= MAX_NESTING + 1
    with contextlib.suppress(ValueError):
        check_nesting(value)
        assert all(isinstance(part, dict) for _, part in schemas_in(value))
        read_tag(data)
        if isinstance(value, dict):
            check_schema(value)
            read_schema(value)


def read_tag(data: bytes) -> None:
    with contextlib.suppress(UnicodeDecodeError, msgspec.DecodeError):
        json.loads(compose(decode_format(data.decode()), {"<|x|>": 5, "<f": 6}, part_source))


def read_schema(value: dict[str, Any]) -> None:
    moved = relocated(value, "#/$defs/whole")
    assert nesting(moved) == nesting(value)
    for name, part in (value["properties"] if isinstance(value.get("properties"), dict) else {}).items():
        types = json_types(part, value)
        within = part_of(value, "properties", name)
        assert json_types(within, within) == types
    pointer = failing_part(value, lambda part: "wrong" if "enum" in json.dumps(part) else "")
    assert not pointer or pointer.startswith("/")


def rules(data: bytes) -> None:
    text = data.decode(errors="replace")
    is_ebnf(text)
    choice_rules(text.split("|"))
    for check in (check_rules, check_regex):
        with contextlib.suppress(ValueError):
            check(text)


GRAMMARS = {
    "schema": Harness(schema, written(SCHEMA, NO_PARTS, *TAGS)),
    "rules": Harness(rules, [text.encode() for text in RULES]),
}
