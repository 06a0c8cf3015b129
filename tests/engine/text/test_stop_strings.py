"""Stop strings: found wherever tokens are cut, nothing of them shown, and nothing else withheld for long."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidewheel.engine.text.stop_strings import StopStrings


def watch(stops: list[str], pieces: list[str], include: bool) -> tuple[str, str | None]:
    """All that is shown, and the stop string that ended it."""
    watcher, shown = StopStrings(stops, include), ""
    for piece in pieces:
        text, stop = watcher.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + watcher.flush(), None


def expected(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """The same, character by character over the whole text."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=200)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=10),
    st.booleans(),
)
@example(["aab"], ["a", "a", "a", "b"], False)
@example(["abc", "b"], ["ab", "c"], False)
def test_the_outcome_does_not_depend_on_how_text_is_cut(stops: list[str], pieces: list[str], include: bool) -> None:
    assert watch(stops, pieces, include) == expected(stops, "".join(pieces), include)


@given(st.lists(st.text("ab", max_size=3), max_size=10))
def test_only_what_may_become_a_stop_string_is_held_back(pieces: list[str]) -> None:
    stop, shown, text = "abab", "", ""
    watcher = StopStrings([stop], include_in_output=False)
    for piece in pieces:
        part, found = watcher.push(piece)
        if found:
            return
        shown, text = shown + part, text + piece
        held = text[len(shown) :]
        assert stop.startswith(held)
        assert len(held) < len(stop)


def test_a_long_stop_string_that_nearly_comes_costs_little() -> None:
    stop = "a" * 4_000 + "b"
    others = ["b" * i + stop for i in range(1, 64)]  # of which nothing has come while all of `stop` nearly has
    watcher = StopStrings([stop, *others], include_in_output=False)
    shown = [watcher.push("a") for _ in range(8_000)]
    assert shown == [("", None)] * 4_000 + [("a", None)] * 4_000
    assert watcher.push("b") == ("", stop)
