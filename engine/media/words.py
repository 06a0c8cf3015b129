"""Finding the words that stand for media in texts."""

from __future__ import annotations

from collections.abc import Iterator


def occurrences(text: str, word: str) -> Iterator[int]:
    """Where a word begins in a text, one after the other."""
    # No regular expression: it would take Python's lock for as long as a long text is.
    at = text.find(word)
    while at >= 0:
        yield at
        at = text.find(word, at + len(word))
