"""DraftCosts: how long a draft model takes to guess, learned from its guesses so far, and how many are worth that."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ..scheduling.cost_model import Fit
from ..scheduling.drafter import StepPrices
from ..scheduling.sequence import Sequence

_UNITS = (1.0, 16.0, 128.0)  # steps, rows, further tokens: scaled to be of like size
_FORGET = 0.99
_COLD_CALLS = 2  # that say nothing of those to come
_FIRST_BACKLOG = 64  # tokens to compute before it is known how long that takes
_HIGHEST_BAR = 0.9


class DraftCosts:
    """The time of a call as `a x steps + b x rows + c x further tokens`.

    A call runs a step for each guess of the sequence that gets most. A step has a row for each sequence that gets so
    many, and the first one also has tokens that the draft model did not know yet.
    """

    def __init__(self) -> None:
        self._fit = Fit(len(_UNITS), _FORGET)
        self._calls = 0

    def observe(self, counts: Seq[int], num_tokens: int, elapsed_ms: float) -> None:
        """Learn from a call that gave each sequence so many guesses, and ran so many tokens more than rows."""
        self._calls += 1
        if self._calls > _COLD_CALLS:
            steps = float(max(max(counts), 1))
            features = (steps, sum(counts) / _UNITS[1], num_tokens / _UNITS[2])
            self._fit.observe(features, elapsed_ms)

    def num_tokens(self, limit_ms: float) -> int:
        """How many further tokens can be computed in that time."""
        token_ms = self._coefficient(2)
        return _FIRST_BACKLOG if token_ms <= 0.0 else int(limit_ms / token_ms)

    def tokens_ms(self, num_tokens: int) -> float:
        """The time of so many further tokens."""
        return self._coefficient(2) * num_tokens

    def counts(self, rates: Mapping[Sequence, tuple[float, int]], prices: StepPrices) -> dict[Sequence, int]:
        """How many guesses to make for each sequence, whose `rates` say what part is right and how many it may get.

        All together they give the most tokens a millisecond.
        """
        step_ms, row_ms = self._coefficient(0), self._coefficient(1) + prices.row_ms
        token_ms = prices.plain_ms / prices.num_sequences
        expected = {s: rate for s, (rate, _) in rates.items()}  # whether the next guess of each counts
        counts: dict[Sequence, int] = {}
        tokens, total_ms, made = float(prices.num_sequences), prices.plain_ms, 0
        while True:
            going_on = {s: e for s, e in expected.items() if made < rates[s][1] and e * token_ms > row_ms}
            more, more_ms = sum(going_on.values()), step_ms + row_ms * len(going_on)
            if not going_on or (tokens + more) * total_ms <= tokens * (total_ms + more_ms):
                return counts
            made += 1
            tokens, total_ms = tokens + more, total_ms + more_ms
            counts |= dict.fromkeys(going_on, made)
            expected = {s: e * rates[s][0] for s, e in going_on.items()}

    def least_probability(self, num_sequences: int, prices: StepPrices) -> float:
        """How likely the guesses of a sequence must be for another one to be worth it, where so many get some."""
        row_ms = self._coefficient(1) + prices.row_ms + self._coefficient(0) / max(num_sequences, 1)
        return min(row_ms * prices.num_sequences / max(prices.plain_ms, 1e-6), _HIGHEST_BAR)

    def _coefficient(self, index: int) -> float:
        return self._fit.coefficients[index] / _UNITS[index]
