"""The page's reader of event streams: the same events, however they arrive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Page

READ = """async (pieces) => {
  const { EventReader } = await import("/web/events.js");
  const reader = new EventReader();
  return pieces.flatMap((piece) => reader.feed(piece));
}"""

lines = st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"]), max_size=9)


@pytest.fixture(scope="module")
def read(scripts_page: Page) -> Callable[[list[str]], list[str]]:
    """The events in a stream that arrives in these pieces."""
    return lambda pieces: scripts_page.evaluate(READ, pieces)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.lists(lines, min_size=1, max_size=3), max_size=4), st.sampled_from(["\n", "\r\n"]), st.data())
def test_events_are_whole_at_any_cut(
    read: Callable[[list[str]], list[str]], sent: list[list[str]], end: str, data: st.DataObject
) -> None:
    stream = "".join(f": a comment{end}" + "".join(f"data: {line}{end}" for line in event) + end for event in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(pieces) == ["\n".join(event) for event in sent]
