"""Counts and times for people."""

from __future__ import annotations


def in_thousands(count: int) -> str:
    """A number of things, as in 361.8 million."""
    for unit, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return str(count)


def in_words_ago(seconds: float) -> str:
    """A time that has passed, as in 3 days ago."""
    for unit, name in ((31_557_600, "year"), (2_629_800, "month"), (604_800, "week"), (86_400, "day"), (3_600, "hour"),
                       (60, "minute")):  # fmt: skip
        if seconds >= unit:
            count = int(seconds // unit)
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"
