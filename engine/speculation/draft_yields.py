"""DraftYields: who gets draft tokens of a batch drafter, by what those so far have given."""

from __future__ import annotations

from collections.abc import Mapping

from ..sequences.sequence import Sequence
from .draft_costs import DraftCosts, StepPrices, Yield

_FIRST_YIELD = (3.0, 2.0)  # draft tokens made and accepted ones that are expected before there were any
_WEIGHT, _COMMON_WEIGHT = 0.1, 0.02  # how much a draft changes what is expected of its sequence, and of others
_RETURNING = 0.02  # how much of that comes back in a step: the text that follows gets its chance
_FIRST_TRIAL, _LAST_TRIAL = 64, 4096  # plans without a draft token, after which one is made to see what it costs by now


class DraftYields:
    """How many draft tokens are accepted: of each sequence that had some, and of a new one."""

    def __init__(self, max_tokens: int) -> None:
        """For drafts of at most `max_tokens` tokens."""
        made, accepted = _FIRST_YIELD
        share = min(max_tokens / made, 1.0)
        self._common = Yield(made * share, accepted * share)  # of a new sequence
        self._yields: dict[int, Yield] = {}  # by Sequence.key, of those that had a draft
        self._plans_without, self._next_trial = 0, _FIRST_TRIAL

    @property
    def num_accepted(self) -> float:
        """How many tokens of a draft are accepted, whichever sequence has it."""
        return self._common.accepted

    def choose(
        self, rooms: Mapping[Sequence, int], costs: DraftCosts, prices: StepPrices
    ) -> tuple[dict[Sequence, int], float]:
        """Those of the sequences that get draft tokens, and how many milliseconds each of them is expected to save.

        `rooms` are the most draft tokens of each. Nobody gets any where that does not pay, but now and then for a
        trial.
        """
        if not rooms:
            return {}, 0.0
        yields = {s: of for s in rooms if costs.pays(of := self._expected(s), prices)}
        saved_ms = costs.worth_ms(yields, prices) if yields else 0.0
        if saved_ms > 0.0:
            self._plans_without, self._next_trial = 0, _FIRST_TRIAL
        else:
            self._plans_without += 1
            if self._plans_without < self._next_trial:
                return {}, 0.0
            # Text, costs and company change.
            self._plans_without, self._next_trial = 0, min(2 * self._next_trial, _LAST_TRIAL)
            best = max(rooms, key=lambda s: s.num_drafted)
            yields, saved_ms = {best: self._expected(best)}, 0.1 * prices.token_ms
        return {s: rooms[s] for s in yields}, saved_ms / len(yields)

    def learn(self, sequence: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        """Note what became of a sequence's draft tokens; no draft tokens are a draft too."""
        of = self._yields.get(sequence.key)
        if of is None:
            of = self._yields[sequence.key] = Yield(self._common.made, self._common.accepted)
        of.learn(num_draft_tokens, num_accepted, _WEIGHT)
        self._common.learn(num_draft_tokens, num_accepted, _COMMON_WEIGHT)

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._yields.pop(sequence.key, None)

    def _expected(self, sequence: Sequence) -> Yield:
        """What a draft of a sequence is expected to give."""
        of = self._yields.get(sequence.key)
        if of is None:
            return self._common
        of.made += _RETURNING * (self._common.made - of.made)
        of.accepted += _RETURNING * (self._common.accepted - of.accepted)
        return of
