"""How many rows a piece of a tower's work has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

_SECONDS = 0.005  # that a piece should take: about as long as a step of a small model
_LEAST_ROWS = 32  # fewer would take longer to read the weights than to compute
_OPERATIONS_PER_SECOND = 20e9  # of a thread, until a piece was measured


class Pace:
    """How many `rows` of one kind of work take a few milliseconds, from 32 to `most`.

    A row takes about `operations`, which `threads` share. Once pieces have run, the time that they took decides. They
    should take other `seconds` where these are given.
    """

    def __init__(self, most: int, operations: int, threads: int, seconds: float | None = None) -> None:
        self._most = most
        self._seconds = _SECONDS if seconds is None else seconds
        self.rows = self._between(self._seconds * _OPERATIONS_PER_SECOND * threads / max(operations, 1))

    def next_piece(self, left: int) -> int:
        """How many of the rows that are left the next piece has, if all of them have about as many."""
        return -(-left // -(-left // self.rows))

    @contextmanager
    def piece(self, rows: int) -> Iterator[None]:
        """Measure a piece. The next one has at most twice as many rows as it should have had, and at least half."""
        start = perf_counter()
        yield
        wanted = rows * self._seconds / max(perf_counter() - start, 1e-9)
        self.rows = self._between(min(max(wanted, self.rows / 2), self.rows * 2))

    def _between(self, rows: float) -> int:
        return round(min(max(rows, _LEAST_ROWS), self._most))
