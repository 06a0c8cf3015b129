"""DraftCosts: how long a draft model takes, learned from its calls so far, and what its draft tokens are worth."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from msgspec import Struct

from ..cost_model import Fit
from ..sequences.sequence import Sequence

_UNITS = (1.0, 16.0, 128.0)  # steps, rows, further tokens: scaled to be of like size
_FORGET = 0.99
_COLD_CALLS = 2  # that say nothing of those to come
_FIRST_BACKLOG = 64  # tokens to compute before it is known how long that takes
_HIGHEST_BAR = 0.9
_SAMPLE_MS = 2.0  # of drafting between two samples: learning from more calls is not worth its time


class StepPrices(Struct, frozen=True):
    """What a step of `num_sequences` decodes takes, in milliseconds.

    `plain_ms` is the device's time without draft tokens, and each row more makes it `row_ms` longer. The engine's own
    time is `engine_ms` then. With draft tokens it is `drafting_ms`, beside the time of the model that makes them. The
    device may take at most `max_ms`.
    """

    num_sequences: int
    plain_ms: float
    row_ms: float
    engine_ms: float
    drafting_ms: float
    max_ms: float

    @property
    def token_ms(self) -> float:
        """What a token costs without draft tokens."""
        return (self.plain_ms + self.engine_ms) / self.num_sequences


class Yield(Struct):
    """How many draft tokens a draft of a sequence had on average, and how many were accepted."""

    made: float
    accepted: float

    def learn(self, made: int, accepted: int, weight: float) -> None:
        """Note one more draft."""
        self.made += weight * (made - self.made)
        self.accepted += weight * (accepted - self.accepted)


class DraftCosts:
    """The time of a call as `a x steps + b x rows + c x further tokens`.

    A call runs a step for each draft token of the sequence that gets most. Step n has a row for each sequence that gets
    at least n. The first step also has the tokens that the draft model did not know yet.
    """

    def __init__(self) -> None:
        self._fit = Fit(len(_UNITS), _FORGET)
        self._calls = 0
        self._since_sample_ms = 0.0

    def observe(self, counts: Seq[int], num_tokens: int, elapsed_ms: float) -> None:
        """Learn from a call that gave sequences `counts` draft tokens, and ran `num_tokens` more tokens than rows."""
        self._calls += 1
        self._since_sample_ms += elapsed_ms
        if self._calls <= _COLD_CALLS or (self._fit.is_trusted and self._since_sample_ms < _SAMPLE_MS):
            return
        self._since_sample_ms = 0.0
        steps = float(max(max(counts), 1))
        self._fit.observe((steps, sum(counts) / _UNITS[1], num_tokens / _UNITS[2]), elapsed_ms)

    def num_tokens(self, limit_ms: float) -> int:
        """How many further tokens can be computed in that time."""
        token_ms = self._coefficient(2)
        return _FIRST_BACKLOG if token_ms <= 0.0 else int(limit_ms / token_ms)

    def tokens_ms(self, num_tokens: int) -> float:
        """The time of `num_tokens` further tokens."""
        return self._coefficient(2) * num_tokens

    def worth_ms(self, yields: Mapping[Sequence, Yield], prices: StepPrices) -> float:
        """How much time a step saves if it drafts for these sequences, by what their draft tokens gave so far.

        That is the time that the accepted draft tokens would take without drafts, less all that drafts take.
        """
        step_ms, row_ms = self._coefficient(0), self._coefficient(1) + prices.row_ms
        accepted = sum([of.accepted for of in yields.values()])
        made = sum([of.made for of in yields.values()])
        steps = max([of.made for of in yields.values()], default=0.0) + 1.0
        extra_ms = prices.drafting_ms - prices.engine_ms + step_ms * steps + row_ms * made
        return accepted * prices.token_ms - extra_ms

    def pays(self, of: Yield, prices: StepPrices) -> bool:
        """Whether a sequence is better off with draft tokens where others get them."""
        return of.accepted * prices.token_ms > of.made * (self._coefficient(1) + prices.row_ms)

    def min_probability(self, num_sequences: int, prices: StepPrices) -> float:
        """How likely the draft tokens of a sequence must be to be worth one more, where `num_sequences` get some."""
        further_ms = self._coefficient(1) + prices.row_ms + self._coefficient(0) / max(num_sequences, 1)
        return min(further_ms / max(prices.token_ms, 1e-6), _HIGHEST_BAR)

    def _coefficient(self, index: int) -> float:
        return self._fit.coefficients[index] / _UNITS[index]
