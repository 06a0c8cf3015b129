"""The figures of one streamed answer, and summaries of many such figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from sse import EventParser


class StreamError(Exception):
    """A stream that carried an error, or ended before it should."""


@dataclass
class StreamTimer:
    """Reads one streamed answer and notes when each piece of text came.

    Times are `time.perf_counter()` seconds. A piece of text is a chunk with content: the role that opens a chat
    and the closing chunks with a finish reason or the usage hold none. A chunk may carry several tokens, so the
    number of tokens is the server's own (`usage`), or the number of chunks if it sends none.
    """

    started: float
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    reported_tokens: int | None = None
    done: bool = False
    _parser: EventParser = field(default_factory=EventParser)

    def feed(self, chunk: bytes, now: float) -> int:
        """Take the bytes that arrived at `now`; return the number of pieces of text in them.

        Raises StreamError where the server reports an error within the stream.
        """
        before = len(self.arrivals)
        for data in self._parser.feed(chunk):
            if data == "[DONE]":
                self.done = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise StreamError(f"the server reported an error in the stream: {event['error']}")
            if usage := event.get("usage"):
                self.prompt_tokens = usage["prompt_tokens"]
                self.reported_tokens = usage["completion_tokens"]
            self.arrivals.extend(now for choice in event.get("choices", ()) if _has_content(choice))
        return len(self.arrivals) - before

    def finish(self) -> None:
        """Call it when the connection has ended. Raises StreamError if the answer is not complete, or has no text."""
        if not self.done:
            raise StreamError("the stream ended without [DONE]")
        if not self.arrivals:
            raise StreamError("the stream held no text")

    @property
    def ttft_ms(self) -> float:
        """Time to the first piece of text, in milliseconds."""
        return (self.arrivals[0] - self.started) * 1e3

    @property
    def itl_ms(self) -> list[float]:
        """The gaps between one piece of text and the next, in milliseconds."""
        return [(after - before) * 1e3 for before, after in pairwise(self.arrivals)]

    @property
    def tokens(self) -> int:
        """Tokens of the answer: the server's count, otherwise its pieces of text."""
        return len(self.arrivals) if self.reported_tokens is None else self.reported_tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answer over the time from the request to the last of them."""
        return self.tokens / (self.arrivals[-1] - self.started)


def _has_content(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: a value that really occurred. Raises ValueError without values."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Count, mean, p50, p90, p99 and max, rounded to two decimals; only the count if there are no values."""
    if not values:
        return {"count": 0}
    figures = {
        "mean": sum(values) / len(values),
        **{f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)},
        "max": max(values),
    }
    return {"count": len(values), **{name: round(value, 2) for name, value in figures.items()}}


def table(rows: dict[str, dict[str, float]]) -> str:
    """Lay summaries out as text, one row each, for a terminal."""
    columns = ("count", "mean", "p50", "p90", "p99", "max")
    width = max(map(len, rows), default=0)
    lines = [" " * width + "".join(f"{column:>11}" for column in columns)]
    for name, figures in rows.items():
        cells = (f"{figures[column]:>11g}" if column in figures else f"{'-':>11}" for column in columns)
        lines.append(name.ljust(width) + "".join(cells))
    return "\n".join(lines)
