"""Rests of a worker thread: what takes long leaves Python's lock to the event loop for most of the time."""

from __future__ import annotations

import time

_WORK_S, _REST_S = 0.002, 0.004


class Rests:
    """Rests of the thread that makes this, in turns of 2 ms of work and 4 ms of rest.

    The first one is due after `first_after_s` of the thread's processor time.
    """

    def __init__(self, first_after_s: float = _WORK_S) -> None:
        self._due = time.thread_time() + first_after_s

    def if_due(self, now: float | None = None) -> None:
        """Rest if it is time to; `now` is `time.thread_time()`, if that is known."""
        now = time.thread_time() if now is None else now
        if now > self._due:
            time.sleep(_REST_S)
            self._due = now + _WORK_S
