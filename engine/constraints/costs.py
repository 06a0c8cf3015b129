"""What it costs to follow grammars, in time and memory, and which of them cost too much.

llguidance bounds what one mask takes, but not what a sequence's do together, nor what it remembers of them. Schemas and
patterns that people write take a fraction of a millisecond a mask, and less than a megabyte.
"""

from __future__ import annotations

from ..machine.memory import resident_bytes
from ..outputs import FinishReason
from .constraint import Failure, SequenceConstraint

_SLOW_BATCH_S = 0.025
_WATCHED_STEPS = 64  # after a slow one
# Of processor time. A sequence whose masks take more falls behind by the rest, and is ended when that is too much.
_MASK_S = 0.002
_MOST_BEHIND_S = 0.1
# Where a step's masks take longer together, less is enough.
_MOST_STEP_S = 0.15
_MOST_BEHIND_IN_SLOW_STEP_S = 0.02
# What llguidance remembers of a grammar's regular expressions is the grammar's: all its sequences share it.
_MAX_GROWN_BYTES = 64 * 2**20
_UNWEIGHED_BYTES = 4 * 2**20  # that the process may grow by before it is found out why


class MaskCosts:
    """Ends the sequences whose grammars cost too much. They alone: what the others are given stays the same.

    Masks are timed and weighed one by one only for some steps after a slow one, or after the process has grown, since
    together they are faster.
    """

    def __init__(self) -> None:
        self._num_watched = 0
        self._charged: list[SequenceConstraint] = []
        self._step_s = 0.0
        self._resident = resident_bytes()

    @property
    def is_watching(self) -> bool:
        """Whether masks should be made one by one, each to be charged."""
        return self._num_watched > 0

    def begin(self) -> None:
        """A step's masks are begun."""
        self._charged.clear()
        self._step_s = 0.0

    def timed(self, seconds: float) -> None:
        """Some of a step's masks have taken so long."""
        resident = resident_bytes()
        has_grown = resident > self._resident + _UNWEIGHED_BYTES
        self._resident = resident if has_grown else min(self._resident, resident)
        is_slow = seconds > _SLOW_BATCH_S
        self._num_watched = _WATCHED_STEPS if is_slow or has_grown else max(self._num_watched - 1, 0)

    def charge(self, constraint: SequenceConstraint, seconds: float, grown_bytes: int) -> None:
        """A mask has taken so much processor time, and so much memory that it has not given back."""
        assert constraint.grammar is not None
        constraint.grammar.grown_bytes += grown_bytes
        constraint.seconds_behind = max(constraint.seconds_behind + seconds - _MASK_S, 0.0)
        self._charged.append(constraint)
        self._step_s += seconds

    def settle(self) -> None:
        """End those that are too far behind."""
        most = _MOST_BEHIND_S if self._step_s <= _MOST_STEP_S else _MOST_BEHIND_IN_SLOW_STEP_S
        for constraint in self._charged:
            if constraint.grammar is not None and constraint.grammar.grown_bytes > _MAX_GROWN_BYTES:
                _end(constraint, f"what must be remembered to follow it takes more than {_MAX_GROWN_BYTES >> 20} MiB")
            if constraint.seconds_behind > most:
                _end(constraint, f"it is too ambiguous: its masks take more than {_MASK_S * 1e3:g} ms a token")


def _end(constraint: SequenceConstraint, message: str) -> None:
    constraint.failure = constraint.failure or Failure(
        FinishReason.INVALID, f"the grammar cannot be followed: {message}"
    )
