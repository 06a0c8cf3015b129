"""Counts, times and tables for people."""

from __future__ import annotations

from collections.abc import Sequence


def in_thousands(count: int) -> str:
    """A number of things, as in 361.8 million."""
    for unit, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return str(count)


def in_words(seconds: float) -> str:
    """A time, as in 3 days."""
    for unit, name in ((31_557_600, "year"), (2_629_800, "month"), (604_800, "week"), (86_400, "day"), (3_600, "hour"),
                       (60, "minute"), (1, "second")):  # fmt: skip
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''}"
    return "less than a second"


def in_words_ago(seconds: float) -> str:
    """A time that has passed, as in 3 days ago."""
    return f"{in_words(seconds)} ago" if seconds >= 60 else "just now"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with their columns below each other; the last one may have any width."""
    widths = [max(map(len, column)) for column in [*zip(*rows, strict=True)][:-1]]
    return "\n".join(
        "  ".join((*(f"{value:{width}}" for value, width in zip(row[:-1], widths, strict=True)), row[-1]))
        for row in rows
    )
