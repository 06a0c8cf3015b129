"""The JSON scanner agrees with Python's parser on what JSON is and where it ends; literals of Python become JSON."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.server.chat.tools.json_scanner import JsonScanner, is_json
from tidewheel.server.chat.tools.values import python_literal_to_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
jsonish = st.text(alphabet='{}[]:,"\\/ \t\nu0123456789aeflnrstE+-.\x01', max_size=12)


def python_accepts(text: str) -> bool:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@settings(deadline=None, max_examples=60)
@given(jsonish | values.map(json.dumps) | st.tuples(values.map(json.dumps), jsonish).map("".join))
def test_it_takes_what_python_takes(text: str) -> None:
    assert is_json(text) == python_accepts(text)


@settings(deadline=None, max_examples=40)
@given(st.lists(values) | st.dictionaries(st.text(), values), st.text(), st.data())
def test_it_finds_the_end_in_any_pieces(value: Any, tail: str, data: st.DataObject) -> None:
    text = json.dumps(value, indent=data.draw(st.sampled_from([None, 1])))
    scanner = JsonScanner()
    for i, character in enumerate(text):
        assert not scanner.is_done
        assert scanner.scan(character, 0) == 1, text[:i]
    assert scanner.is_done
    scanner = JsonScanner()
    assert scanner.scan(text + tail, 0) == len(text)
    assert scanner.is_done


@settings(deadline=None, max_examples=40)
@given(values)
def test_pythons_literals(value: Any) -> None:
    source = repr(value)
    converted = python_literal_to_json(source)
    assert converted is not None
    assert json.loads(converted) == ast.literal_eval(source) == value


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("0x1F", 31), ("1_000", 1000), ("+1.", 1.0), (".5", 0.5), ("-2e3", -2000.0), ("true", True), ("null", None),
        ("'a\\x41\\n\\d'", "aA\n\\d"), ('"""a"b\n"""', 'a"b\n'), ("[1, ]", [1]), ("{'a': [{}, ], }", {"a": [{}]}),
        ("'\\ud800'", "\ud800"),
    ],
)  # fmt: skip
def test_literals_that_json_spells_otherwise(source: str, expected: Any) -> None:
    converted = python_literal_to_json(source)
    assert converted is not None
    assert json.loads(converted) == expected
    converted.encode()


@pytest.mark.parametrize(
    "source",
    ["", "x", "1 +", "1j", "f(x)", "(1, 2)", "{1: 2}", "[1 2]", "[", "'a", "'a' 'b'", "b'a'", "1e999", "nan", "[,]",
     "007", "{'a'}", "1,", "9" * 5000, "[" * 100_000],
)  # fmt: skip
def test_what_is_no_literal(source: str) -> None:
    assert python_literal_to_json(source) is None
