"""The Hermes parser: the same parts, however the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tidewheel.server.chat.pieces import Turn
from tidewheel.server.chat.tools import CLOSE, OPEN, HermesParser


def parse(*pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls (name, arguments) of a text that arrives in these pieces."""
    parser = HermesParser()
    turn = Turn.of([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
    return turn.content, [(call.name, call.arguments) for call in turn.calls]


CALL = f'{OPEN}\n{{"name": "add", "arguments": {{"a": [1, "<tool_call>", "ü 🌊"]}}}}\n{CLOSE}'
PARSED = ("add", '{"a": [1, "<tool_call>", "ü 🌊"]}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("just text", ("just text", [])),
        (CALL, ("", [PARSED])),
        (f"Well. \n{CALL}\n", ("Well.", [PARSED])),
        (f"{CALL}\n{CALL}", ("", [PARSED, PARSED])),
        (f"{CALL} and more", (" and more", [PARSED])),
        (CALL.removesuffix(CLOSE), ("", [PARSED])),  # the model stopped where the tag was due
        (f'{OPEN}{{"name": "f"}}{CLOSE}', ("", [("f", "{}")])),
        ("a < b and <tool", ("a < b and <tool", [])),
        ("trailing space \n", ("trailing space \n", [])),
    ],
)
def test_parts_at_every_cut(text: str, expected: tuple[str, list[tuple[str, str]]]) -> None:
    assert parse(text) == expected
    assert parse(*text) == expected
    for cut in range(len(text)):
        assert parse(text[:cut], text[cut:]) == expected


@pytest.mark.parametrize(
    "body",
    [
        "not json", "", "[1]", "null", '{"arguments": {}}', '{"name": 3}', '{"name": "f", "arguments": 3}',
        '{"name": "f", "arguments": {}', '{"name": "f"} {}', "[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(body: str) -> None:
    text = f"{OPEN}{body}{CLOSE}"
    assert parse(text) == (text, [])
    assert parse(f"{OPEN}{body}") == (f"{OPEN}{body}", [])


def test_text_is_not_held_back_without_a_reason() -> None:
    parser = HermesParser()
    assert parser.feed("Hello") == ["Hello"]
    assert parser.feed(" world <") == [" world"]
    assert parser.feed("b>") == [" <b>"]
    assert parser.finish() == []


names = st.text(min_size=1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
)
fragments = st.one_of(
    st.text(), st.sampled_from([OPEN, CLOSE, "<tool", "_call>", "</", "\n", " "]), st.just(CALL),
    st.builds(
        lambda name, value: f"{OPEN}{json.dumps({'name': name, 'arguments': {'v': value}})}{CLOSE}", names, json_values
    ),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(fragments).map("".join), st.data())
def test_any_text_gives_the_same_parts_in_any_pieces(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(*pieces) == parse(text)


@settings(deadline=None)
@given(st.text().filter(lambda text: OPEN not in text))
def test_text_without_a_call_is_untouched(text: str) -> None:
    assert parse(*text) == (text, [])


@settings(deadline=None)
@given(names, st.dictionaries(st.text(), json_values))
def test_a_call_survives_the_trip(name: str, arguments: dict[str, object]) -> None:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    assume(CLOSE not in body)
    text, calls = parse(OPEN + body + CLOSE)
    assert text == ""
    ((parsed_name, parsed_arguments),) = calls
    assert parsed_name == name
    assert json.loads(parsed_arguments) == arguments
