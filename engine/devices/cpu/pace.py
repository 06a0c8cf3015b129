"""How many rows a piece of a tower's work has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

_LEAST_ROWS = 32  # fewer would take longer to read the weights than to compute
_OPERATIONS_PER_SECOND = 20e9  # of a thread, until a piece was measured


class Pace:
    """How many rows of one kind of work take so many seconds, from 32 to `most`.

    A row takes about `operations`, which `threads` share. Once pieces have run, the time that they took decides.
    """

    def __init__(self, most: int, operations: int, threads: int) -> None:
        self._most = most
        self._row_s = max(operations, 1) / (_OPERATIONS_PER_SECOND * threads)

    def rows(self, seconds: float) -> int:
        """The rows of a piece that should take that long."""
        return round(min(max(seconds / self._row_s, _LEAST_ROWS), self._most))

    def next_piece(self, left: int, seconds: float) -> int:
        """How many of the rows that are left the next piece has, if all of them have about as many."""
        return -(-left // -(-left // self.rows(seconds)))

    @contextmanager
    def piece(self, rows: int) -> Iterator[None]:
        """Measure a piece of so many rows.

        A row is taken for twice as fast as before at most, and for a tenth slower: most pieces that took much longer
        than the others were held up by other processes, and smaller ones would be so as often and as long.
        """
        start = perf_counter()
        yield
        measured = (perf_counter() - start) / rows
        self._row_s = max(min(max(measured, self._row_s / 2), self._row_s * 1.1), 1e-12)
