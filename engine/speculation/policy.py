"""SpeculationPolicy: in which steps a drafter is called and for whom, and how many of its draft tokens pay."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

from ..cost_model import CostModel, StepLoad
from ..sequences.sequence import Sequence
from .acceptance_rates import AcceptanceRates
from .budget import SpeculationBudget
from .draft_costs import StepPrices
from .draft_yields import DraftYields
from .drafter import BatchDrafter
from .engine_time import EngineTime

_FRUITLESS = 8  # steps in which a batch drafter drafted nothing, after which it is called in one step of as many


class SpeculationPolicy:
    """Owns what is learned of drafts: what drafter calls and rows cost, and how often draft tokens are accepted.

    A draft token pays if the tokens that are expected of it cost no more time than the step's own do. That depends on
    how many of the sequence's draft tokens were accepted before, and on what the cost model knows: where many sequences
    decode, a row more costs as much as a token is worth, and nothing is drafted. Tokens that a grammar forces are
    always accepted.

    For a drafter of one sequence at a time, a step calls `begin_calls`, then for each sequence `may_call`, `timed` and
    `num_paying`, then `end_calls`. For a batch drafter, it calls `calls_batch`, `begin_batch` and `choose`, then
    `end_batch`.
    """

    def __init__(self, cost_model: CostModel, clock: Callable[[], float], max_batch_tokens: int = 0) -> None:
        """`clock` gives seconds. A batch drafter drafts at most `max_batch_tokens` for a sequence."""
        self._yields = DraftYields(max_batch_tokens)
        self._cost_model = cost_model
        self._clock = clock
        self._rates = AcceptanceRates()
        self._budget = SpeculationBudget()
        self._time = EngineTime(clock)
        self._calls_ms: dict[int, float] = {}  # what a drafter took in this step, by Sequence.key
        self._token_ms = self._row_ms = 0.0  # what a token costs in this step, and a row more
        self._saved_ms = 0.0  # by an accepted token
        self._fruitless = 0  # steps in which a batch drafter drafted nothing, one after the other
        self._rest = self._rested = 0  # steps without calls: to come, and over
        self._resting = (0, -1)  # how many sequences rest, and the last one's key

    def rests(self, decoding: Seq[Sequence]) -> bool:
        """Whether no drafter is called in this step, because none of these sequences is due for a call."""
        self._time.skip()
        if self._rest and decoding and self._resting == (len(decoding), decoding[-1].key):
            self._rest, self._rested = self._rest - 1, self._rested + 1
            return True
        self._calls_ms = {}
        return False

    def begin_calls(self, decoding: Seq[Sequence], *, calling: bool) -> None:
        """A step begins that may draft for these sequences one after the other, `calling` a drafter."""
        if self._rested:
            self._budget.skip([s.key for s in decoding], self._rested)
        self._rates.next_step(1 + self._rested)
        self._rest = self._rested = 0
        if calling:
            self._time.begin()
            self._budget.begin(len(decoding))

    def may_call(self, sequence: Sequence) -> bool:
        """Whether the drafter is called for a sequence in this step."""
        return self._budget.may_call(sequence.key)

    def price(self, load: StepLoad) -> float:
        """Find out what tokens and rows cost in a step of this load. Returns the time that it has left."""
        step_ms = self._cost_model.predict_ms(load)
        self._token_ms = (step_ms + self._time.plain_ms) / max(load.num_decodes, 1)
        # A step less is only computed if the others get ahead as well.
        self._saved_ms = self._token_ms * (1 + 1 / max(load.num_decodes, 1)) / 2
        self._row_ms = self._cost_model.draft_ms(load.decode_pairs // max(load.num_decodes, 1), 1)
        return self._cost_model.max_step_ms - step_ms

    def call_may_pay(self, sequence: Sequence, num_forced: int) -> bool:
        """Whether one draft token behind `num_forced` forced ones would pay."""
        return self._cost_model.knows_decodes and self._pays(sequence, num_forced + 1, self._rates.of(sequence.key))

    def timed(self, sequence: Sequence, propose: Callable[[], list[int]]) -> list[int]:
        """What a drafter call gives for a sequence."""
        started = self._clock()
        proposed = propose()
        self._calls_ms[sequence.key] = (self._clock() - started) * 1e3
        return proposed

    def num_paying(self, sequence: Sequence, count: int, num_forced: int, spare_ms: float) -> int:
        """How many of `count` draft tokens pay, of which the first `num_forced` are forced, within `spare_ms`."""
        rate = self._rates.of(sequence.key)
        while count and not (
            self._pays(sequence, count, rate ** max(count - num_forced, 0))
            and self._cost_model.draft_ms(sequence.num_tokens, count) <= spare_ms
        ):
            count -= 1
        return count

    def end_calls(self, drafted: Collection[Sequence]) -> None:
        """All calls of a step are over, and these sequences have drafts."""
        self._time.drafted(len(drafted))
        for key in self._calls_ms.keys() - {s.key for s in drafted}:
            self._budget.note(key, -self._calls_ms[key], self._token_ms)

    def end_without_calls(self, decoding: Seq[Sequence]) -> None:
        """No sequence was due for a call, as in most steps. Until one is, steps spend no time on drafters."""
        self._time.drafted(0)
        if decoding:
            self._rest = self._budget.min_wait([s.key for s in decoding])
            self._resting = (len(decoding), decoding[-1].key)

    def learn(self, key: int, num_draft_tokens: int, num_accepted: int, num_forced: int) -> None:
        """Note what became of a draft that `num_paying` has cut. The first `num_forced` tokens were forced."""
        if (call_ms := self._calls_ms.get(key)) is not None:
            rows_ms = self._row_ms * (num_draft_tokens - num_forced)
            draft_ms = 0.0 if num_forced else self._time.draft_ms
            saved_ms = max(num_accepted - num_forced, 0) * self._saved_ms
            self._budget.note(key, saved_ms - rows_ms - draft_ms - call_ms, self._token_ms)
        if num_accepted >= num_forced and num_draft_tokens > num_forced:
            self._rates.learn(key, num_draft_tokens - num_forced, num_accepted - num_forced)

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._budget.ended(sequence.key)
        self._rates.ended(sequence.key)
        self._yields.ended(sequence)

    def end_step(self, *, drafted: bool) -> None:
        """Learn how long the engine itself takes, after a step without prompts, with drafts or without."""
        self._time.end(self._cost_model.last_ms, drafted=drafted)

    def calls_batch(self) -> bool:
        """Whether a batch drafter is called in this step: in few, where it had nothing to gain for a while."""
        if self._fruitless < _FRUITLESS:
            return True
        self._fruitless += 1
        return self._fruitless % _FRUITLESS == 0

    def begin_batch(self, count: int, load: StepLoad) -> StepPrices:
        """A batch drafter is to draft for a step of `count` decodes, which costs this much."""
        self._time.begin()
        cost_model = self._cost_model
        return StepPrices(
            count,
            cost_model.predict_ms(load),
            cost_model.draft_ms(load.decode_pairs // count, 1),
            self._time.plain_ms,
            self._time.drafted_ms,
            cost_model.limit_ms(load),
        )

    def choose(self, drafter: BatchDrafter, sequences: Seq[Sequence], prices: StepPrices) -> dict[Sequence, int]:
        """How many draft tokens each sequence gets of a batch drafter, as far as that pays; 0 are left out."""
        # Where a row costs as much as a token, not even draft tokens that are all accepted pay.
        if not self._cost_model.knows_decodes or prices.row_ms >= prices.token_ms:
            return {}
        counts, saved_ms = self._yields.choose(drafter.rooms(sequences), drafter.costs, prices)
        return drafter.ready(counts, saved_ms, self._yields.num_accepted, prices)

    def learn_batch(self, sequence: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        """Note what became of the draft tokens of a batch drafter; none are a draft too."""
        self._yields.learn(sequence, num_draft_tokens, num_accepted)

    def end_batch(self, num_drafts: int, drafting_ms: float) -> None:
        """A batch drafter has made drafts for `num_drafts` sequences."""
        self._time.drafted(num_drafts, drafting_ms)
        self._fruitless = 0 if num_drafts or drafting_ms > 0.0 else self._fruitless + 1

    def _pays(self, sequence: Sequence, count: int, probability: float) -> bool:
        """Whether the last of `count` draft tokens is worth its time, if all are accepted with this `probability`."""
        return self._cost_model.draft_ms(sequence.num_tokens + count - 1, 1) <= probability * self._token_ms
