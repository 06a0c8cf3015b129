"""SpeculationBudget: whether drafter calls save more time than they take, and for which sequences."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

_WEIGHT, _COMMON_WEIGHT = 0.1, 0.02  # how much a drafter call changes what is known of its sequence, and of all
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 1024  # steps
_TOLERATED = 0.02  # of the time of all tokens, that drafter calls may lose
_SAVINGS = 16.0  # times a token's time: the most that is kept of what drafter calls have won
# Of a token's time, that a drafter call after a pause must save on average, so that chance does not end the pauses.
_CONVINCING = 0.1


class _Record(Struct):
    saved_ms: float  # a drafter call, on average
    pause: int = 0  # steps that the last one took, or takes
    waits: int = 0  # steps of it that are left


class _Common(Struct):
    """What is known of drafter calls in steps with about the same number of decodes."""

    # By a drafter call, times a token's time: the first, or one that was interrupted, says little of others.
    max_lost: float
    saved_ms: float = 0.0  # a drafter call, on average
    budget_ms: float = 0.0  # what drafter calls may still lose
    token_ms: float = 0.0  # 0 as long as none was noted

    @property
    def loses(self) -> bool:
        return self.saved_ms < -self.share_ms(1)

    def note(self, saved_ms: float, token_ms: float) -> None:
        """Note what a drafter call has saved. Whether the first ones pay is not known yet."""
        if self.token_ms == 0.0:
            self.budget_ms = _SAVINGS * token_ms
        self.token_ms = token_ms
        self.budget_ms += saved_ms
        self.saved_ms += _COMMON_WEIGHT * (saved_ms - self.saved_ms)

    def share_ms(self, num_tokens: int) -> float:
        """The part of the tokens' time that drafter calls may lose."""
        return _TOLERATED * self.token_ms * num_tokens

    def earn(self, num_tokens: int) -> None:
        """Add the share of `num_tokens` tokens to the budget."""
        self.budget_ms = min(self.budget_ms + self.share_ms(num_tokens), _SAVINGS * self.token_ms)


class SpeculationBudget:
    """Notes what each drafter call cost and what it gave, by sequence.

    A sequence that loses time by draft tokens gets no drafter call for a pause. Pauses double. Text changes, so every
    sequence gets another chance, but few of them. All drafter calls together may lose a fiftieth of the time, and what
    they have won shortly before. Then the drafter is not called. While they lose, it is called for only one sequence in
    a step.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}  # by Sequence.key
        self._commons: dict[int, _Common] = {}  # by the bits of how many decode
        self.begin(1)

    def begin(self, num_sequences: int) -> None:
        """Begin a step in which `num_sequences` decode."""
        self._num_sequences = num_sequences
        new = _Common(max(num_sequences / 4, 1.0))
        self._common = self._commons.setdefault(num_sequences.bit_length(), new)
        self._common.earn(num_sequences)
        self._has_tried = False

    def may_call(self, key: int) -> bool:
        """Whether the drafter is asked for a sequence in this step."""
        common = self._common
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record(common.saved_ms)
        if record.waits:
            record.waits -= 1
            return False
        if common.budget_ms < 0.0 or (self._has_tried and common.loses):
            return False
        self._has_tried = True
        return True

    def min_wait(self, keys: Iterable[int]) -> int:
        """For how many steps the drafter is asked for none of these sequences, which `may_call` has seen."""
        common = self._common
        waits = min((self._records[key].waits for key in keys), default=0)
        if common.budget_ms >= 0.0:
            return waits
        return max(waits, int(-common.budget_ms / common.share_ms(self._num_sequences)))

    def skip(self, keys: Iterable[int], num_steps: int) -> None:
        """Note `num_steps` steps in which `may_call` was not called for these sequences."""
        self._common.earn(self._num_sequences * num_steps)
        for key in keys:
            if (record := self._records.get(key)) is not None:
                record.waits = max(record.waits - num_steps, 0)

    def note(self, key: int, saved_ms: float, token_ms: float) -> None:
        """Note how much time a drafter call has saved. It is below 0 if the call took more than it gave.

        `token_ms` is what a token costs without draft tokens. While it is not known it is 0, and nothing is learned.
        """
        record = self._records.get(key)
        if record is None or token_ms <= 0.0:
            return
        common = self._common
        saved_ms = max(saved_ms, -common.max_lost * token_ms)
        common.note(saved_ms, token_ms)
        record.saved_ms += _WEIGHT * (saved_ms - record.saved_ms)
        if record.saved_ms >= (_CONVINCING if record.pause else -_TOLERATED) * token_ms:
            record.pause = 0
        else:
            record.pause = min(max(2 * record.pause, _FIRST_PAUSE), _LONGEST_PAUSE)
            record.waits = record.pause

    def ended(self, key: int) -> None:
        """Forget a sequence."""
        self._records.pop(key, None)
