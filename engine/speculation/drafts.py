"""Drafts: draft tokens run in the step of the token before them, and are kept where they were right.

So one step may give a sequence several tokens (speculative decoding, https://arxiv.org/abs/2211.17192). Each draft
token is compared with the token that the sequence samples at its place, with the seed and position of that place. So
the answer is the same as without drafts. K and V of rejected draft tokens stay behind the computed tokens until others
are written over them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial

from msgspec import Struct

from ..cache.manager import CacheManager
from ..constraints.lookahead import Lookahead, first_masks, jump_forward_tokens, may_look_ahead, timed
from ..cost_model import CostModel, StepLoad
from ..sequences.sequence import Sequence
from .draft_costs import StepPrices
from .drafter import BatchDrafter, CachingDrafter, Continued, Drafter, RememberingDrafter
from .policy import SpeculationPolicy

_MAX_FORCED = 64  # tokens in a draft
_LOOKAHEAD_S = 0.005  # a step, on the engine thread: then no grammar is asked any more
_MAX_HISTORY = 2**20  # tokens: with penalties, each row of a draft reads all tokens before it


class DraftStats(Struct, frozen=True):
    """How many drafts have run, how many draft tokens they had, and how many were accepted, since the start.

    `accepted_at` has how many first draft tokens were accepted, how many second ones and so on.
    """

    drafts_total: int = 0
    draft_tokens_total: int = 0
    accepted_total: int = 0
    accepted_at: tuple[int, ...] = ()


class DraftTokens(Struct, frozen=True):
    """The draft tokens of one sequence, with the `lookahead` of its constraint if it has one."""

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
    """Makes the drafts of a step: what grammars force, and behind that what a drafter proposes as far as it pays.

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
        """Nobody gets a draft while more than `max_sequences` decode, nor one of more than `max_draft_tokens`.

        `clock` gives seconds. `extended` are the keys of sequences that `choose` has given blocks.
        """
        self._model = drafter if isinstance(drafter, BatchDrafter) else None
        self._drafter = None if isinstance(drafter, BatchDrafter) else drafter
        self._remembering = drafter if isinstance(drafter, RememberingDrafter) else None
        self.extended: set[int] = set()
        self._cache = cache
        self._policy = SpeculationPolicy(cost_model, clock, 0 if self._model is None else self._model.num_tokens)
        self._cost_model = cost_model
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_sequences = max_sequences
        self._max_draft_tokens = max_num_batched_tokens if max_draft_tokens is None else max_draft_tokens
        self._num_forced: dict[int, int] = {}  # tokens that a grammar forces, by Sequence.key, in the last drafts
        self._drafts_total = self._draft_tokens_total = 0
        self._accepted_at: list[int] = []

    @property
    def stats(self) -> DraftStats:
        """What became of all drafts. From any thread."""
        accepted_at = tuple(self._accepted_at)
        return DraftStats(self._drafts_total, self._draft_tokens_total, sum(accepted_at), accepted_at)

    @property
    def has_drafter(self) -> bool:
        """Whether anything is drafted beside what a grammar forces."""
        return self._drafter is not None or self._model is not None

    def choose(self, decoding: Seq[Sequence], load: StepLoad, num_spare: int) -> dict[Sequence, DraftTokens]:
        """The drafts of those of `decoding` that get one. They have blocks for them. `load` is that without drafts.

        They take none of the last `num_spare` free blocks, no more time than a step may take, and at most half of the
        tokens that it has left: prompts get the other half.
        """
        if self._policy.rests(decoding):
            return {}
        self.extended, self._num_forced = set(), {}
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
        if others and self._policy.calls_batch():
            room -= sum([len(draft.token_ids) for draft in drafts.values()])
            prices = self._policy.begin_batch(len(decoding), _with_drafts(load, drafts))
            drafts |= self._draft_together(self._model, others, prices, room, num_spare)
        return drafts

    def _draft_each(
        self, decoding: Seq[Sequence], load: StepLoad, room: int, num_spare: int, until: float
    ) -> dict[Sequence, DraftTokens]:
        """What grammars force, and what a drafter proposes behind that, for one sequence after the other.

        There is room for `room` draft tokens. No grammar is asked after `time.perf_counter()` is `until`.
        """
        policy, has_drafter = self._policy, self._drafter is not None
        policy.begin_calls(decoding, calling=has_drafter)
        due = [s for s in decoding if s.constraint is not None or (has_drafter and policy.may_call(s))]
        if not due:
            if has_drafter:
                policy.end_without_calls(decoding)
            return {}
        drafts: dict[Sequence, DraftTokens] = {}
        spare_ms = policy.price(load)
        for sequence in due:
            if room <= 0:
                break
            if sequence.constraint is not None and time.perf_counter() > until:
                continue
            draft = _followed(sequence, self._draft_tokens(sequence, spare_ms, min(room, self._max_tokens(sequence))))
            if not draft:
                continue
            wanted = sequence.num_tokens + len(draft.token_ids)
            if draft := draft.first(self._cache.extend(sequence, wanted, num_spare) - sequence.num_tokens):
                drafts[sequence] = draft
                spare_ms -= self._cost_model.draft_ms(sequence.num_tokens, len(draft.token_ids))
                room -= len(draft.token_ids)
        if has_drafter:
            policy.end_calls(drafts)
        return drafts

    def learn(self, sequence: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        """Note what became of a draft."""
        self._drafts_total += 1
        self._draft_tokens_total += num_draft_tokens
        self._accepted_at += [0] * (num_accepted - len(self._accepted_at))
        for position in range(num_accepted):
            self._accepted_at[position] += 1
        num_forced = self._num_forced.get(sequence.key, 0)
        if self._model is None:
            self._policy.learn(sequence.key, num_draft_tokens, num_accepted, num_forced)
        elif not num_forced:
            self._learn_batch(self._model, sequence, num_draft_tokens, num_accepted)

    def _learn_batch(self, model: BatchDrafter, sequence: Sequence, num_draft_tokens: int, num_accepted: int) -> None:
        model.learn(sequence, num_draft_tokens, num_accepted)
        self._policy.learn_batch(sequence, num_draft_tokens, num_accepted)

    def end_step(self, *, drafted: bool) -> None:
        """Learn how long the engine itself takes, after a step without prompts, with drafts or without."""
        self._policy.end_step(drafted=drafted)

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """KV blocks of the first cache group are copied before the step, `(from, to)`."""
        if self._model is not None and pairs:
            self._model.copy_blocks(pairs)

    def _draft_together(
        self, model: BatchDrafter, sequences: Seq[Sequence], prices: StepPrices, room: int, num_spare: int
    ) -> dict[Sequence, DraftTokens]:
        """Let a model draft for as many sequences as that pays for. There is room for `room` draft tokens."""
        policy = self._policy
        counts = policy.choose(model, sequences, prices)
        for sequence, count in counts.items():
            blocks = sequence.num_blocks
            count = min(count, room, self._max_tokens(sequence))
            places = self._cache.extend(sequence, sequence.num_tokens + count, num_spare)
            counts[sequence] = count = min(count, places - sequence.num_tokens)
            room -= count
            if sequence.num_blocks > blocks:
                self.extended.add(sequence.key)
        counts = {s: n for s, n in counts.items() if n > 0}
        until = time.perf_counter() + _LOOKAHEAD_S
        masks = first_masks([s.constraint for s in counts], until)
        drafted, drafting_ms = model.draft(counts, prices, masks)
        for sequence, draft_tokens in drafted.items():
            if not draft_tokens:
                policy.learn_batch(sequence, 0, 0)
        drafts: dict[Sequence, DraftTokens] = {}
        until = time.perf_counter() + _LOOKAHEAD_S
        for sequence, draft_tokens in drafted.items():
            if sequence.constraint is not None and time.perf_counter() > until:
                continue
            if draft := _followed(sequence, _before_end(sequence, draft_tokens)):
                drafts[sequence] = draft
            elif draft_tokens:  # all are behind the end, or the grammar forbids the first
                self._learn_batch(model, sequence, len(draft_tokens), 0)
        policy.end_batch(len(drafts), drafting_ms)
        return drafts

    def _draft_tokens(self, sequence: Sequence, spare_ms: float, max_tokens: int) -> list[int]:
        """What a grammar forces, and what the drafter proposes behind that: at most `max_tokens`, as far as it pays.

        The step has `spare_ms` left.
        """
        constraint, drafter, policy = sequence.constraint, self._drafter, self._policy
        tokens = [] if constraint is None else jump_forward_tokens(constraint)[:_MAX_FORCED]
        num_forced = len(tokens)
        if num_forced:
            self._num_forced[sequence.key] = num_forced
        # Without a constraint, the policy was asked before the sequence came here.
        is_due = drafter is not None and (constraint is None or policy.may_call(sequence))
        if drafter is not None and is_due and policy.call_may_pay(sequence, num_forced):
            seen = Continued(sequence, tokens) if tokens else sequence
            tokens = tokens + policy.timed(sequence, partial(drafter.propose, seen))
        tokens = _before_end(sequence, tokens[:max_tokens])
        return tokens[: policy.num_paying(sequence, len(tokens), num_forced, spare_ms)]

    def ended(self, sequence: Sequence) -> None:
        """Note the end of a sequence."""
        self._policy.ended(sequence)
        if self._model is not None:
            self._model.ended(sequence)
        elif self._remembering is not None and sequence.search is None:
            self._remembering.ended(sequence)

    def forget(self) -> None:
        """Draft nothing from sequences that have ended."""
        if self._remembering is not None:
            self._remembering.forget()

    def lose_cache(self) -> None:
        """The content of all KV caches is gone."""
        if isinstance(self._model, CachingDrafter):
            self._model.lose_cache()

    def _max_tokens(self, sequence: Sequence) -> int:
        """The most draft tokens behind which a sequence's state can go back, without passing a place for a snapshot.

        With penalties, each row reads the whole history, which limits them too.
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
