"""Restarts: how often a pipeline may be started again, and after which pauses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_MOST = 5  # within the time that is remembered
_REMEMBERED_S = 600.0
_FIRST_PAUSE_S = 1.0  # before the second restart; the first is at once


class Restarts:
    """Counts failures. Each within ten minutes of others doubles the pause before the next start, and the sixth is the
    last. `total` are the starts that there were.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._clock = clock
        self._failures: deque[float] = deque()

    def pause_s(self) -> float | None:
        """Note a failure: how long to wait until the next start; None if there have been too many."""
        now = self._clock()
        while self._failures and now - self._failures[0] > _REMEMBERED_S:
            self._failures.popleft()
        before = len(self._failures)
        self._failures.append(now)
        if before >= _MOST:
            return None
        self.total += 1
        return _FIRST_PAUSE_S * 2.0 ** (before - 1) if before else 0.0
