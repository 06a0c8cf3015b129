"""Drafts: draft tokens run in the step of the token before them and kept where they were right.

So one step may give a sequence several tokens (speculative decoding, https://arxiv.org/abs/2211.17192). Each draft
token is compared with the token that the sequence samples at its place, with the seed and position of that place: the
tokens are those without drafts. K and V of rejected draft tokens stay behind the computed tokens until others are
written over them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from msgspec import Struct

from ..cache.manager import CacheManager
from ..constraints.lookahead import Lookahead, first_masks, jump_forward_tokens, may_look_ahead, timed
from ..cost_model import CostModel, StepLoad
from ..sequences.sequence import Sequence
from .acceptance_rates import AcceptanceRates
from .budget import SpeculationBudget
from .drafter import BatchDrafter, CachingDrafter, Continued, Drafter, RememberingDrafter, StepPrices
from .engine_time import EngineTime

_FRUITLESS = 8  # steps without a draft token, after which only every so many steps one is thought of

_MAX_FORCED = 64  # tokens in a draft
_LOOKAHEAD_S = 0.005  # a step, on the engine thread: then no grammar is asked any more
_MAX_HISTORY = 2**20  # tokens: with penalties, each row of a draft reads all tokens before it


class DraftStats(Struct, frozen=True):
    """How many drafts have run, the draft tokens in them, and those that were accepted. They count from the start.

    `accepted_at` has how many first draft tokens were accepted, how many second ones and so on.
    """

    drafts_total: int = 0
    draft_tokens_total: int = 0
    accepted_total: int = 0
    accepted_at: tuple[int, ...] = ()


class DraftTokens(Struct, frozen=True):
    """What is drafted of one sequence, with the `lookahead` of its constraint if it has one."""

    token_ids: list[int]
    lookahead: Lookahead | None = None

    def __bool__(self) -> bool:
        """Whether anything is drafted."""
        return bool(self.token_ids)

    def first(self, count: int) -> DraftTokens:
        """The first of them alone."""
        token_ids = self.token_ids[:count]
        if self.lookahead is not None:
            self.lookahead.draft_tokens = token_ids
        return DraftTokens(token_ids, self.lookahead)


class Drafts:
    """Takes from a drafter what a step has room for, as far as it pays. Its draft tokens follow on what a grammar
    forces.

    A draft token pays if the tokens that are expected of it cost no more time than the step's own do. That depends on
    how many of the sequence's draft tokens were accepted before, and on what the cost model knows: where many sequences
    decode, a row more costs as much as a token is worth, and nothing is drafted. Forced tokens are always right.

    Beams get no draft: what they sample depends on more than the tokens before.
    """

    def __init__(
        self,
        drafter: Drafter | BatchDrafter | None,
        cache: CacheManager,
        cost_model: CostModel,
        max_num_batched_tokens: int,
        *,
        max_sequences: int | None = None,
        max_draft_tokens: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Nobody gets a draft while more than `max_sequences` decode, nor one of more than `max_draft_tokens`. `clock`
        gives seconds.

        `extended` are the keys of sequences that `choose` has given blocks.
        """
        self._model = drafter if isinstance(drafter, BatchDrafter) else None
        self._drafter = None if isinstance(drafter, BatchDrafter) else drafter
        self.extended: set[int] = set()
        self._remembering = drafter if isinstance(drafter, RememberingDrafter) else None
        self._cache = cache
        self._cost_model = cost_model
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_sequences = max_sequences
        self._max_draft_tokens = max_num_batched_tokens if max_draft_tokens is None else max_draft_tokens
        self._clock = clock
        self._rates = AcceptanceRates()
        self._num_forced: dict[int, int] = {}  # tokens that a grammar forces, by Sequence.key, in the last drafts
        self._budget = SpeculationBudget()
        self._asked: dict[int, float] = {}  # milliseconds that a drafter took in this step, by Sequence.key
        self._token_ms = self._row_ms = 0.0  # what a token costs in this step, and a row more
        self._saved_ms = 0.0  # by a token that was drafted
        self._fruitless = 0  # steps without a draft token, one after the other
        # Steps in which the drafter is asked for nobody, of so many sequences with this last key: left, and over.
        self._rest = self._rested = 0
        self._resting = (0, -1)
        self._time = EngineTime(clock)
        self._drafts_total = self._draft_tokens_total = 0
        self._accepted_at: list[int] = []

    @property
    def stats(self) -> DraftStats:
        """What became of all drafts. From any thread."""
        accepted_at = tuple(self._accepted_at)
        return DraftStats(self._drafts_total, self._draft_tokens_total, sum(accepted_at), accepted_at)

    @property
    def has_drafter(self) -> bool:
        """Whether others are drafted than those that a grammar forces."""
        return self._drafter is not None or self._model is not None

    def choose(self, decoding: Seq[Sequence], load: StepLoad, num_spare: int) -> dict[Sequence, DraftTokens]:
        """Draft tokens for those of `decoding` that get any; they have blocks for them then. `load` is that without
        draft tokens.

        They take none of the last `num_spare` free blocks, no more time than a step may take, and half of the tokens
        that it has left: prompts get the other half.
        """
        if self._rest and decoding and self._resting == (len(decoding), decoding[-1].key):
            self._rest, self._rested = self._rest - 1, self._rested + 1
            self._time.skip()
            return {}
        self.extended, self._num_forced, self._asked = set(), {}, {}
        self._time.skip()
        if not decoding or (self._max_sequences is not None and len(decoding) > self._max_sequences):
            return {}
        room = (self._max_num_batched_tokens - load.num_tokens) // 2
        until = time.perf_counter() + _LOOKAHEAD_S
        followed = [s for s in decoding if s.search is None and (s.constraint is None or may_look_ahead(s.constraint))]
        if self._model is None:
            return self._draft_each(followed, load, room, num_spare, until)
        constrained = [s for s in followed if s.constraint is not None]
        drafts = self._draft_each(constrained, load, room, num_spare, until) if constrained else {}
        is_late = time.perf_counter() > until
        others = [s for s in followed if s.key not in self._num_forced and not (is_late and s.constraint)]
        if others and not self._is_idle():
            room -= sum([len(draft_tokens.token_ids) for draft_tokens in drafts.values()])
            prices = self._prices(len(decoding), _with_drafts(load, drafts))
            drafted = self._draft_together(self._model, others, prices, room, num_spare)
            self._fruitless = 0 if drafted or self._time.drafting_ms > 0.0 else self._fruitless + 1
            drafts |= drafted
        return drafts

    def _draft_each(
        self, decoding: Seq[Sequence], load: StepLoad, room: int, num_spare: int, until: float
    ) -> dict[Sequence, DraftTokens]:
        """What grammars force, and what a drafter proposes behind that, for one sequence after the other.

        There is room for so many draft tokens. No grammar is asked after `time.perf_counter()` is `until`.
        """
        drafts: dict[Sequence, DraftTokens] = {}
        if self._rested:
            self._budget.skip([s.key for s in decoding], self._rested)
        self._rates.next_step(1 + self._rested)
        self._rest = self._rested = 0
        if self._drafter is not None:
            self._time.begin()
            self._budget.begin(len(decoding))
        asked = [s for s in decoding if s.constraint is not None or self._may_ask(s)]
        if not asked:
            if self._drafter is not None:
                self._time.drafted(0)
                self._begin_rest(decoding)
            return drafts
        step_ms = self._cost_model.predict_ms(load)
        self._token_ms = (step_ms + self._time.plain_ms) / max(load.num_decodes, 1)
        # A step less is only computed if the others get ahead as well.
        self._saved_ms = self._token_ms * (1 + 1 / max(load.num_decodes, 1)) / 2
        self._row_ms = self._cost_model.draft_ms(load.decode_pairs // max(load.num_decodes, 1), 1)
        spare_ms = self._cost_model.max_step_ms - step_ms
        for sequence in asked:
            if room <= 0:
                break
            if sequence.constraint is not None and time.perf_counter() > until:
                continue
            made = _followed(sequence, self._draft_tokens(sequence, spare_ms, min(room, self._most(sequence))))
            if not made:
                continue
            wanted = sequence.num_tokens + len(made.token_ids)
            if made := made.first(self._cache.extend(sequence, wanted, num_spare) - sequence.num_tokens):
                drafts[sequence] = made
                spare_ms -= self._cost_model.draft_ms(sequence.num_tokens, len(made.token_ids))
                room -= len(made.token_ids)
        if self._drafter is not None:
            self._time.drafted(len(drafts))
            for key in self._asked.keys() - {s.key for s in drafts}:
                self._budget.note(key, -self._asked[key], self._token_ms)
        return drafts

    def _begin_rest(self, decoding: Seq[Sequence]) -> None:
        """Where draft tokens lose time, that is most steps:

        they shall take no time until somebody is asked for again.
        """
        if decoding:
            self._rest = self._budget.min_wait([s.key for s in decoding])
            self._resting = (len(decoding), decoding[-1].key)

    def learn(self, sequence: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        """Note what became of a draft."""
        self._drafts_total += 1
        self._draft_tokens_total += num_draft_tokens
        self._accepted_at += [0] * (num_accepted - len(self._accepted_at))
        for place in range(num_accepted):
            self._accepted_at[place] += 1
        forced = self._num_forced.get(sequence.key, 0)
        if self._model is not None:
            if not forced:
                self._model.learn(sequence, num_draft_tokens, num_accepted)
            return
        if (asked_ms := self._asked.get(sequence.key)) is not None:
            rows_ms = self._row_ms * (num_draft_tokens - forced)
            draft_ms = 0.0 if forced else self._time.draft_ms
            saved_ms = max(num_accepted - forced, 0) * self._saved_ms
            self._budget.note(sequence.key, saved_ms - rows_ms - draft_ms - asked_ms, self._token_ms)
        if num_accepted >= forced and num_draft_tokens > forced:
            self._rates.learn(sequence.key, num_draft_tokens - forced, num_accepted - forced)

    def end_step(self, *, drafted: bool) -> None:
        """Learn how long the engine itself takes, after a step without prompts, with drafts or without."""
        self._time.end(self._cost_model.last_ms, drafted=drafted)

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Hear which KV blocks of the first cache group are copied before the step, `(from, to)`."""
        if self._model is not None and pairs:
            self._model.copy_blocks(pairs)

    def _is_idle(self) -> bool:
        """Whether a model that had nothing to gain for a while is not asked in this step."""
        if self._fruitless < _FRUITLESS:
            return False
        self._fruitless += 1
        return self._fruitless % _FRUITLESS != 0

    def _draft_together(
        self, model: BatchDrafter, sequences: Seq[Sequence], prices: StepPrices, room: int, num_spare: int
    ) -> dict[Sequence, DraftTokens]:
        """Let a model draft for as many sequences as that pays for. There is room for so many draft tokens."""
        self._time.begin()
        counts: dict[Sequence, int] = {}
        # Where a row costs as much as a token, not even draft tokens that are all accepted pay.
        if self._cost_model.knows_decodes and prices.row_ms < prices.token_ms:
            counts = model.plan(sequences, prices)
        for sequence, count in counts.items():
            blocks = sequence.num_blocks
            count = min(count, room, self._most(sequence))
            places = self._cache.extend(sequence, sequence.num_tokens + count, num_spare)
            counts[sequence] = count = min(count, places - sequence.num_tokens)
            room -= count
            if sequence.num_blocks > blocks:
                self.extended.add(sequence.key)
        counts = {s: n for s, n in counts.items() if n > 0}
        until = time.perf_counter() + _LOOKAHEAD_S
        masks = first_masks([s.constraint for s in counts], until)
        drafted, drafting_ms = model.draft(counts, prices, masks)
        drafts: dict[Sequence, DraftTokens] = {}
        until = time.perf_counter() + _LOOKAHEAD_S
        for sequence, draft_tokens in drafted.items():
            if sequence.constraint is not None and time.perf_counter() > until:
                continue
            if made := _followed(sequence, _before_end(sequence, draft_tokens)):
                drafts[sequence] = made
            elif draft_tokens:  # all are behind the end, or the grammar forbids the first
                model.learn(sequence, len(draft_tokens), 0)
        self._time.drafted(len(drafts), drafting_ms)
        return drafts

    def _prices(self, count: int, load: StepLoad) -> StepPrices:
        cost_model = self._cost_model
        return StepPrices(
            count,
            cost_model.predict_ms(load),
            cost_model.draft_ms(load.decode_pairs // count, 1),
            self._time.plain_ms,
            self._time.drafted_ms,
            cost_model.limit_ms(load),
        )

    def _draft_tokens(self, sequence: Sequence, spare_ms: float, most: int) -> list[int]:
        """What a grammar forces, and what the drafter proposes behind that, at most so many, as far as it pays.

        The step has so much time left.
        """
        constraint, rate = sequence.constraint, self._rates.of(sequence.key)
        draft_tokens = [] if constraint is None else jump_forward_tokens(constraint)[:_MAX_FORCED]
        num_forced = len(draft_tokens)
        if num_forced:
            self._num_forced[sequence.key] = num_forced
        drafter = self._drafter
        may_ask = constraint is None or self._may_ask(sequence)  # without a constraint, `choose` has seen to it
        may_ask = may_ask and self._cost_model.knows_decodes
        if drafter is not None and may_ask and self._pays(sequence, num_forced + 1, rate):
            started = self._clock()
            draft_tokens = draft_tokens + drafter.propose(
                Continued(sequence, draft_tokens) if draft_tokens else sequence
            )
            self._asked[sequence.key] = (self._clock() - started) * 1e3
        draft_tokens = _before_end(sequence, draft_tokens[:most])
        while draft_tokens:
            count = len(draft_tokens)
            if self._pays(sequence, count, rate ** max(count - num_forced, 0)) and (
                self._cost_model.draft_ms(sequence.num_tokens, count) <= spare_ms
            ):
                break
            draft_tokens.pop()
        return draft_tokens

    def _may_ask(self, sequence: Sequence) -> bool:
        """Whether there is a drafter that is asked for a sequence in this step."""
        return self._drafter is not None and self._budget.may_ask(sequence.key)

    def _pays(self, sequence: Sequence, count: int, probability: float) -> bool:
        """Whether the last of `count` draft tokens takes no more time than it is worth, if all are accepted so
        probably.
        """
        return self._cost_model.draft_ms(sequence.num_tokens + count - 1, 1) <= probability * self._token_ms

    def ended(self, sequence: Sequence) -> None:
        """Note the end of a sequence."""
        self._budget.ended(sequence.key)
        self._rates.ended(sequence.key)
        if self._model is not None:
            self._model.ended(sequence)
        elif self._remembering is not None and sequence.search is None:
            self._remembering.ended(sequence)

    def forget(self) -> None:
        """Draft nothing from sequences that have ended."""
        if self._remembering is not None:
            self._remembering.forget()

    def lose_cache(self) -> None:
        """Hear that the content of all KV caches is gone."""
        if isinstance(self._model, CachingDrafter):
            self._model.lose_cache()

    def _most(self, sequence: Sequence) -> int:
        """The most draft tokens behind which a sequence's state can go back, and that pass no place for a snapshot of
        it.

        And no more than there is room for what their rows read.
        """
        most = self._cache.decode_tokens(sequence, 1 + self._max_draft_tokens) - 1
        return min(most, _MAX_HISTORY // sequence.num_tokens) if sequence.sampling.uses_history else most


def _with_drafts(load: StepLoad, drafts: Mapping[Sequence, DraftTokens]) -> StepLoad:
    for sequence, draft_tokens in drafts.items():
        load = load.plus_draft(sequence.num_tokens, len(draft_tokens.token_ids))
    return load


def _before_end(sequence: Sequence, draft_tokens: list[int]) -> list[int]:
    """Those before the sequence would end."""
    most = sequence.max_length - sequence.num_tokens - 1
    for i, token in enumerate(draft_tokens[:most]):
        if token in sequence.stop_ids:
            return draft_tokens[:i]
    return draft_tokens[:most]


def _followed(sequence: Sequence, draft_tokens: list[int]) -> DraftTokens:
    """Draft tokens with what follows them in the sequence's constraint, cut before the first that it forbids."""
    constraint = sequence.constraint
    if constraint is None or not draft_tokens:
        return DraftTokens(draft_tokens)
    with timed(constraint, 1):
        lookahead = Lookahead(constraint, draft_tokens)
    return DraftTokens(lookahead.draft_tokens, lookahead)
