"""Depth: counting without recursion gives the same as recursion, and no input is too deep to be counted."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import swept

from tidewheel.engine.constraints.depth import (
    MAX_CHAIN,
    MAX_NESTING,
    check_regex,
    check_rules,
    check_schema,
    longest_chain,
    nesting,
)
from tidewheel.engine.constraints.json_schema import json_types
from tidewheel.engine.constraints.source import is_ebnf

JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=3),
    max_leaves=20,
)


def nested(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + max(map(nested, value.values() if isinstance(value, dict) else value), default=0)
    return 0


@given(JSON)
def test_nesting(value: Any) -> None:
    assert nesting(value) == nested(value)
    assert nesting(value, 1) == min(nested(value), 2)


def chained(references: dict[int, list[int]]) -> int:
    seen = set[int]()

    def depth_of(name: int) -> int:
        if name in seen or name not in references:
            return 0
        seen.add(name)
        return 1 + max([depth_of(other) for other in references[name]], default=0)

    return max([depth_of(name) for name in references], default=0)


@given(st.dictionaries(st.integers(0, 8), st.lists(st.integers(0, 9), max_size=4), max_size=8))
def test_the_longest_chain(references: dict[int, list[int]]) -> None:
    assert longest_chain(references) == chained(references)


def definitions(count: int, part: Any) -> dict[str, Any]:
    named = {f"d{i}": part({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count - 1)}
    return {"$ref": "#/$defs/d0", "$defs": {**named, f"d{count - 1}": {"type": "string"}}}


@pytest.mark.parametrize(
    "part",
    [
        lambda ref: ref,
        lambda ref: {"type": "object", "properties": {"a": ref}},
        lambda ref: {"type": "array", "items": ref},
        swept(lambda ref: {"allOf": [ref]}),
    ],
)
def test_chains_of_definitions(part: Any) -> None:
    check_schema(definitions(MAX_CHAIN - 1, part))
    with pytest.raises(ValueError, match=str(MAX_CHAIN)):
        check_schema(definitions(10_000, part))


def test_what_is_no_reference_is_not_followed() -> None:
    far = definitions(2000, lambda ref: ref)
    check_schema({"const": {"$ref": "#/$defs/d0"}, "$defs": far["$defs"]})
    check_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"items": {"$ref": "#/$defs/a"}}}})
    check_schema({"$ref": "https://example.com/schema"})


@pytest.mark.parametrize(
    ("rule", "first"),
    [
        ('r{}: r{} "a: (b"', "start: r0"),
        ("?r{}.2: r{} /a(b/", "start: r0"),
        ('r{}[lazy]: r{} // (', "start: r0"),
        ('r{} ::= r{} "a ::= ((" [(]', "root ::= r0"),
    ],
)  # fmt: skip
def test_chains_of_rules(rule: str, first: str) -> None:
    def grammar(count: int) -> str:
        return "\n".join([first, *(rule.format(i, i + 1) for i in range(count))])

    check_rules(grammar(MAX_CHAIN - 1))
    with pytest.raises(ValueError, match=str(MAX_CHAIN)):
        check_rules(grammar(8000))


def test_groups() -> None:
    for most, check in ((MAX_NESTING, check_regex), (MAX_NESTING, check_rules)):
        head = "start: " if check is check_rules else ""
        check(f"{head}{'(' * most}{')' * most}" * 3)
        with pytest.raises(ValueError, match=str(most)):
            check(f"{head}{'(' * 100_000}")
    check_regex(r"[(]\((a)" * 1000)


def test_deep_json() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    assert nesting(deep) == MAX_NESTING + 1
    with pytest.raises(ValueError, match=str(MAX_NESTING)):
        check_schema(deep)
    while deep:  # Python would free it by calling itself
        deep = deep.pop("items", None)


def test_types_of_references_that_go_round_in_circles() -> None:
    """30 alternatives, each with 30 again, are not 30 to the power of their depth."""
    many = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j % 40}"} for j in range(i, i + 30)]} for i in range(40)}
    root = {"$defs": {**many, "d39": {"anyOf": [{"type": "integer"}, {"const": "a"}, {"$ref": "#/$defs/d0"}]}}}
    assert json_types({"$ref": "#/$defs/d0"}, root) == {"integer", "string"}
    chain = definitions(5000, lambda ref: ref)
    assert json_types(chain, chain) == {"string"}
    assert json_types(json.loads('{"$ref": "#"}'), {"$ref": "#"}) == set()


BEGINNINGS = ["", "a", '"', "[", "/", "a::="]
REPEATED = [" ", "\t", "\n", "[", "/", '"', '\\"', "\\/", "\\[", "a\n", "a [", "a ::=", "[a(", '"\\']


@pytest.mark.parametrize(
    ("beginning", "repeated"),
    [
        pytest.param(beginning, repeated, marks=() if (i + j) % 3 == 0 else pytest.mark.sweep)
        for i, beginning in enumerate(BEGINNINGS)
        for j, repeated in enumerate(REPEATED)
    ],
)
def test_texts_of_any_kind_are_read_in_one_pass(beginning: str, repeated: str) -> None:
    """What takes time that grows with the square of the text takes minutes here."""
    text = beginning + repeated * (2**18 // len(repeated))
    assert is_ebnf(text) in (True, False)
    for check in (check_regex, check_rules):
        with contextlib.suppress(ValueError):
            check(text)
