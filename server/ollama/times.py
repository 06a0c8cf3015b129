"""Times as Ollama writes them."""

from __future__ import annotations

from datetime import datetime, timezone


def rfc3339(moment: datetime | None = None) -> str:
    """A moment, by default now, as Ollama writes it."""
    return (moment or datetime.now(timezone.utc)).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """At least 1: clients divide by durations."""
    return max(int(seconds * 1e9), 1)
