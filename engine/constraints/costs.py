"""Limits on the time and memory of grammars in use.

llguidance bounds the time of one mask, but not of all masks of a sequence, and not the memory that it keeps. Schemas
and patterns that people write take a fraction of a millisecond a mask, and less than a megabyte.
"""

from __future__ import annotations

from ..machine.memory import resident_bytes
from ..outputs import FinishReason
from .constraint import Failure, SequenceConstraint

_SLOW_BATCH_S = 0.025
_WATCHED_STEPS = 64  # steps with single measurements after a slow step
# Seconds of processor time. What a mask takes above _MASK_S is added up. A sequence ends above _MAX_BEHIND_S in all.
_MASK_S = 0.002
_MAX_BEHIND_S = 0.1
# In a step whose masks take longer than this together, a smaller sum is enough.
_MAX_STEP_S = 0.15
_MAX_BEHIND_IN_SLOW_STEP_S = 0.02
# llguidance stores the states of regular expressions in the grammar, and all its sequences share them.
_MAX_GROWN_BYTES = 64 * 2**20
_UNWEIGHED_BYTES = 4 * 2**20  # growth of the process after which each grammar is measured


class MaskCosts:
    """Ends the sequences whose grammars cost too much. The masks of other sequences do not change.

    Masks are faster together. So their time and memory are measured one by one only for some steps after a slow step,
    or after the process has grown.
    """

    def __init__(self) -> None:
        self._num_watched = 0
        self._charged: list[SequenceConstraint] = []
        self._step_s = 0.0
        self._resident = resident_bytes()

    @property
    def is_watching(self) -> bool:
        """Whether masks should be made one by one, so that each can be measured."""
        return self._num_watched > 0

    def begin(self) -> None:
        """Note that the masks of a step begin."""
        self._charged.clear()
        self._step_s = 0.0

    def timed(self, seconds: float) -> None:
        """Add the time of some of a step's masks."""
        self._num_watched = max(self._num_watched - 1, 0)
        if not self.has_grown() and seconds > _SLOW_BATCH_S:
            self._num_watched = _WATCHED_STEPS

    def has_grown(self) -> bool:
        """Whether the process takes much more memory than when it was last asked, so that masks are measured now."""
        resident = resident_bytes()
        has_grown = resident > self._resident + _UNWEIGHED_BYTES
        self._resident = resident if has_grown else min(self._resident, resident)
        if has_grown:
            self._num_watched = _WATCHED_STEPS
        return has_grown

    def charge(self, constraint: SequenceConstraint, seconds: float, grown_bytes: int) -> None:
        """Add the processor time of one mask, and the memory that it took and has not freed."""
        assert constraint.grammar is not None
        constraint.grammar.grown_bytes += grown_bytes
        constraint.seconds_behind = max(constraint.seconds_behind + seconds - _MASK_S, 0.0)
        self._charged.append(constraint)
        self._step_s += seconds

    def settle(self) -> None:
        """End the sequences that have used too much."""
        most = _MAX_BEHIND_S if self._step_s <= _MAX_STEP_S else _MAX_BEHIND_IN_SLOW_STEP_S
        for constraint in self._charged:
            if constraint.grammar is not None and constraint.grammar.grown_bytes > _MAX_GROWN_BYTES:
                _end(constraint, f"following it takes more than {_MAX_GROWN_BYTES >> 20} MiB of memory")
            if constraint.seconds_behind > most:
                _end(constraint, f"it is too ambiguous: its masks take more than {_MASK_S * 1e3:g} ms a token")


def _end(constraint: SequenceConstraint, message: str) -> None:
    constraint.failure = constraint.failure or Failure(
        FinishReason.INVALID, f"the grammar cannot be followed: {message}"
    )
