"""JSON of too many values is refused while it comes in: the count equals what a parser finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from server.conftest import RunningServer

from tidewheel.server.http.json_limits import LONGEST_NAME, MAX_PARTS, MIN_VALUES, JsonCounts

TEXT = st.text(st.sampled_from('",:[]{}\\ \n\taé') | st.characters(), max_size=8)
JSON = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=30,
)


def counted(value: Any) -> Iterator[tuple[int, int]]:
    """The commas of a value, and its brackets and colons."""
    if isinstance(value, list | dict):
        fields = len(value) if isinstance(value, dict) else 0
        yield max(len(value) - 1, 0), 1 + fields
        for inner in value.values() if isinstance(value, dict) else value:
            yield from counted(inner)


def names(value: Any) -> Iterator[str]:
    """The names of all fields."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from names(inner)


@settings(deadline=None, max_examples=40)
@given(value=JSON, ascii_only=st.booleans(), size=st.integers(1, 40))
def test_what_is_between_strings_is_counted(value: Any, ascii_only: bool, size: int) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode(errors="replace")
    counts = JsonCounts()
    for start in range(0, len(raw), size):
        counts.add(raw[start : start + size])
    found = list(counted(value))
    assert (counts.values, counts.parts) == (sum(n for n, _ in found), sum(n for _, n in found))
    written = [json.dumps(name, ensure_ascii=ascii_only).encode(errors="replace")[1:-1] for name in names(value)]
    bare = [name.replace(b"\\\\", b"").replace(b'\\"', b"") for name in written]  # escapes need not be counted
    assert max(map(len, bare), default=0) <= counts.longest_name <= max(map(len, written), default=0)


def test_any_bytes_are_counted_somehow() -> None:
    counts = JsonCounts()
    for piece in (b"", b'"\\', b"", b'\\\\"', bytes(range(256)), b"\\" * 7):
        counts.add(piece)


def test_too_many_values_are_refused(server: RunningServer) -> None:
    ids = b"[" + b"1," * MIN_VALUES + b"1,1]"
    lists = b"[" + b"[]," * MAX_PARTS + b"[]]"
    for value, limit in ((ids, MIN_VALUES), (lists, MAX_PARTS)):
        response = server.http.post("/v1/completions", content=b'{"prompt":' + value + b"}")
        assert response.status_code == 413
        error = response.json()["error"]
        assert error["code"] == "body_too_large"
        assert str(limit) in error["message"]


def test_a_long_name_is_refused(server: RunningServer) -> None:
    response = server.post("/v1/completions", {"prompt": "a", "n" * 2**20: 1})
    assert response.status_code == 413
    assert f"{LONGEST_NAME} bytes" in response.json()["error"]["message"]


def test_text_is_no_value(server: RunningServer) -> None:
    text = '{"a": [1, 2, "\\\\"]}, ' * (MAX_PARTS // 2)
    response = server.post("/v1/completions", {"prompt": text, "truncate_prompt_tokens": 5, "max_tokens": 1})
    assert response.status_code == 200, response.text
