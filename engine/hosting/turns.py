"""Turns: the engine threads of one process take turns on the machine's cores, one step at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LONGEST_LEAD_S = 0.05  # that one makes up for in a row: as long, the streams of the other stand still


class Turns:
    """Gives the cores to one thread at a time: to the one that has used them least, of those that want them.

    Who had nothing to do does not make up for it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` is in seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._holder: Turn | None = None
        self._waiting: list[Turn] = []  # in the order in which they came
        self._level_s = 0.0  # nobody who waits has used less

    def join(self) -> Turn:
        """A turn for one more thread."""
        return Turn(self)

    def take(self, turn: Turn) -> int:
        """See Turn."""
        with self._lock:
            now = self._clock()
            if self._holder is turn:
                self._charge(turn, now)
                if all(other.used_s > turn.used_s for other in self._waiting):
                    self._level_s = max(self._level_s, turn.used_s)
                    turn.since = now
                    return len(self._waiting)
            else:
                turn.used_s = max(turn.used_s, self._level_s)
            self._waiting.append(turn)
            if self._holder is turn or self._holder is None:
                self._pass_on(now)
        turn.granted.wait()
        turn.granted.clear()
        return len(self._waiting)

    def give_back(self, turn: Turn) -> None:
        """See Turn."""
        with self._lock:
            if self._holder is turn:
                now = self._clock()
                self._charge(turn, now)
                self._pass_on(now)

    @property
    def is_taken(self) -> bool:
        """Whether a thread has the cores, from any thread."""
        return self._holder is not None

    @property
    def num_waiting(self) -> int:
        """How many threads wait for their turn."""
        return len(self._waiting)

    def _charge(self, turn: Turn, now: float) -> None:
        turn.used_s += now - turn.since
        if self._waiting:
            least_s = min(other.used_s for other in self._waiting)
            turn.used_s = min(turn.used_s, least_s + _LONGEST_LEAD_S)

    def _pass_on(self, now: float) -> None:
        self._holder = None
        if self._waiting:
            self._holder = turn = min(self._waiting, key=lambda turn: turn.used_s)
            self._waiting.remove(turn)
            self._level_s = max(self._level_s, turn.used_s)
            turn.since = now
            turn.granted.set()


class Turn:
    """One thread's turns. All methods are called on that thread."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.used_s = 0.0
        self.since = 0.0  # when it got the cores
        self.granted = threading.Event()

    def take(self) -> int:
        """Wait for the cores, before a step. Returns how many others wait for them then.

        Call it again before each next step: it keeps the cores if all who wait have used them more.
        """
        return self._turns.take(self)

    def give_back(self) -> None:
        """Leave the cores to others, before waiting for something else. Calling it twice is allowed."""
        self._turns.give_back(self)
