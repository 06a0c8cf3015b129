"""Histogram: counts in buckets, cheap enough for every step and every token."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate


class Histogram:
    """Counts values by the upper bounds of buckets. One thread observes, by a bisection; any thread may read."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts `value` in its bucket."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_many(self, value: float, count: int) -> None:
        """Counts `value` as often as it was seen."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus' cumulative buckets, `(upper bound, count)`, the last one `+Inf`."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True))
