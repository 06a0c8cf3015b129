"""What it costs to follow grammars, in time and memory, and which of them cost too much.

llguidance bounds what one mask takes, but not what a sequence's do together, nor what it remembers of them. Schemas and
patterns that people write take a fraction of a millisecond a mask, and less than a megabyte.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from tidewheel.engine.constraints.constraint import Failure, SequenceConstraint
from tidewheel.engine.memory import resident_bytes
from tidewheel.engine.request import FinishReason

_SLOW_BATCH_S = 0.025
_WATCHED_STEPS = 16  # after a slow one
# Of processor time. A sequence whose masks take more falls behind by the rest, and is ended when that is too much.
_MASK_S = 0.002
_MOST_BEHIND_S = 0.1
# Where a step's masks take longer together, less is enough.
_MOST_STEP_S = 0.15
_MOST_BEHIND_IN_SLOW_STEP_S = 0.02
MAX_MATCHER_BYTES = 64 * 2**20  # of one sequence
_MAX_MATCHERS_BYTES = 256 * 2**20  # of all together
_UNWEIGHED_BYTES = 16 * 2**20  # that the process may grow by before they are weighed


class MaskCosts:
    """Ends the sequences whose grammars cost too much. They alone: what the others are given stays the same.

    Masks are timed one by one only for some steps after a slow one, since together they are faster. Matchers are
    weighed only when the process has grown.
    """

    def __init__(self) -> None:
        self._num_watched = 0
        self._charged: list[SequenceConstraint] = []
        self._step_s = 0.0
        self._resident = resident_bytes()
        self._heap_bytes = _heap_meter()

    @property
    def is_watching(self) -> bool:
        """Whether masks should be timed one by one."""
        return self._num_watched > 0

    def begin(self) -> None:
        """A step's masks are begun."""
        self._charged.clear()
        self._step_s = 0.0

    def timed(self, seconds: float) -> None:
        """Some of a step's masks have taken so long."""
        self._num_watched = _WATCHED_STEPS if seconds > _SLOW_BATCH_S else max(self._num_watched - 1, 0)

    def charge(self, constraint: SequenceConstraint, seconds: float) -> None:
        """A mask has taken so much processor time."""
        constraint.seconds_behind = max(constraint.seconds_behind + seconds - _MASK_S, 0.0)
        self._charged.append(constraint)
        self._step_s += seconds

    def settle(self) -> None:
        """End those that are too far behind."""
        most = _MOST_BEHIND_S if self._step_s <= _MOST_STEP_S else _MOST_BEHIND_IN_SLOW_STEP_S
        for constraint in self._charged:
            if constraint.seconds_behind > most:
                _end(constraint, f"it is too ambiguous: its masks take more than {_MASK_S * 1e3:g} ms a token")

    def weigh(self, constraints: Sequence[SequenceConstraint]) -> None:
        """Look at what the matchers hold, if the process has grown since the last time."""
        resident = resident_bytes()
        self._resident = min(self._resident, resident)
        if self._heap_bytes is None or resident < self._resident + _UNWEIGHED_BYTES:
            return
        weights = sorted(((self._weight(c, self._heap_bytes), c) for c in constraints), key=lambda pair: -pair[0])
        total = sum(weight for weight, _ in weights)
        for weight, constraint in weights:
            if weight <= MAX_MATCHER_BYTES and total <= _MAX_MATCHERS_BYTES:
                break
            total -= weight
            _end(constraint, f"what must be remembered to follow it takes {weight >> 20} MiB, which is too much")
        self._resident = resident

    @staticmethod
    def _weight(constraint: SequenceConstraint, heap_bytes: Callable[[], int]) -> int:
        matcher = constraint.matcher()
        if matcher is None:
            return 0
        before = heap_bytes()
        copy = matcher.deep_copy()  # takes what the matcher takes
        weight = heap_bytes() - before
        del copy
        return max(weight, 0)


def _end(constraint: SequenceConstraint, message: str) -> None:
    constraint.failure = constraint.failure or Failure(
        FinishReason.INVALID, f"the grammar cannot be followed: {message}"
    )


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def _heap_meter() -> Callable[[], int] | None:
    """A function that says how many bytes are allocated; None where the C library is not a glibc that can tell."""
    info = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if info is None:
        return None
    info.restype = _MallInfo

    def heap_bytes() -> int:
        now = info()
        return int(now.uordblks) + int(now.hblkhd)

    return heap_bytes
