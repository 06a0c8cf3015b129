"""Drafts: guesses at the tokens to come, run in the step of the token before them and kept where they were right.

So one step may give a sequence several tokens (speculative decoding, https://arxiv.org/abs/2211.17192). Each guess is
compared with the token that the sequence samples at its place, with the seed and position of that place: the tokens are
those without drafts. K and V of wrong guesses stay behind the computed tokens until others are written over them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from msgspec import Struct

from ..cache.manager import CacheManager
from ..constraints.lookahead import Lookahead, forced_tokens, may_look_ahead, timed
from .cost_model import CostModel, StepLoad
from .drafter import BatchDrafter, Drafter, RememberingDrafter, StepPrices
from .sequence import Sequence

# Of guesses that are right: what is expected of a sequence that has had none, how much each guess changes it, and how
# much of it comes back in a step without any, so that the text that follows gets its chance.
_FIRST_RATE, _LESSON, _RETURNING = 0.7, 0.2, 0.0005

_MOST_FORCED = 64  # tokens in a draft
_LOOKAHEAD_S = 0.005  # a step, on the engine thread: then no grammar is asked any more
_MOST_HISTORY = 2**20  # tokens: with penalties, each row of a draft reads all tokens before it


class DraftStats(Struct, frozen=True):
    """How many drafts have run, the guesses in them, and those that were right. They count from the start."""

    drafts_total: int = 0
    guesses_total: int = 0
    right_total: int = 0


class Guesses(Struct, frozen=True):
    """What is guessed of one sequence, with the `lookahead` of its constraint if it has one."""

    token_ids: list[int]
    lookahead: Lookahead | None = None


class Drafts:
    """Takes from a drafter what a step has room for, as far as it pays. What a grammar forces goes before its guesses.

    A guess pays if the tokens that are expected of it cost no more time than the step's own do. That depends on how
    many of the sequence's guesses were right before, and on what the cost model knows: where many sequences decode, a
    row more costs as much as a token is worth, and nothing is guessed. Forced tokens are always right.

    Beams get no draft: what they sample depends on more than the tokens before.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        cache: CacheManager,
        cost_model: CostModel,
        max_num_batched_tokens: int,
        *,
        most_sequences: int | None = None,
    ) -> None:
        """Nobody gets a draft while more than `most_sequences` decode.

        `extended` are the keys of sequences that `choose` has given blocks.
        """
        self._drafter = drafter
        self._model = drafter if isinstance(drafter, BatchDrafter) else None
        self.extended: set[int] = set()
        self._remembering = drafter if isinstance(drafter, RememberingDrafter) else None
        self._cache = cache
        self._cost_model = cost_model
        self._max_num_batched_tokens = max_num_batched_tokens
        self._most_sequences = most_sequences
        self._rates: dict[int, float] = {}  # of guesses that are right, by Sequence.key
        self._forced: set[int] = set()  # keys of those whose last draft is what a grammar forces
        self.stats = DraftStats()

    @property
    def has_drafter(self) -> bool:
        """Whether others are guessed than those that a grammar forces."""
        return self._drafter is not None

    def choose(self, decoding: Seq[Sequence], load: StepLoad, num_spare: int) -> dict[Sequence, Guesses]:
        """Guesses for those of `decoding` that get any; they have blocks for them then. `load` is that without guesses.

        They take none of the last `num_spare` free blocks, no more time than a step may take, and half of the tokens
        that it has left: prompts get the other half.
        """
        drafts: dict[Sequence, Guesses] = {}
        self.extended, self._forced = set(), set()
        if not decoding or (self._most_sequences is not None and len(decoding) > self._most_sequences):
            return drafts
        known = self._rates
        self._rates = rates = {s.key: _returning(known.get(s.key, _FIRST_RATE)) for s in decoding}
        until = time.perf_counter() + _LOOKAHEAD_S
        most = (load.num_tokens + self._max_num_batched_tokens) // 2
        plain_ms = self._cost_model.predict_ms(load)
        token_ms = plain_ms / max(len(decoding), 1)
        if self._model is not None:
            self._guess_together(self._model, decoding, load, most - load.num_tokens, num_spare)
        for sequence in decoding:
            constraint = sequence.constraint
            if sequence.search is not None:
                continue
            if constraint is not None and (time.perf_counter() > until or not may_look_ahead(constraint)):
                continue
            rate = rates[sequence.key]
            guesses = [] if constraint is None else forced_tokens(constraint)[:_MOST_FORCED]
            if guesses:
                rate = 1.0
                self._forced.add(sequence.key)
            elif self._drafter is not None and self._pays(load, sequence, 1, rate, token_ms):
                guesses = self._drafter.propose(sequence)
            guesses = _before_end(sequence, guesses[: most - load.num_tokens])
            while guesses and not self._fits(load, sequence, len(guesses), rate, token_ms):
                guesses.pop()
            lookahead = None
            if guesses and constraint is not None:
                with timed(constraint, 1):
                    lookahead = Lookahead(constraint, guesses)
                guesses = lookahead.guesses
            if not guesses:
                continue
            room = self._cache.extend(sequence, sequence.num_tokens + len(guesses), num_spare) - sequence.num_tokens
            if guesses := guesses[:room]:
                if lookahead is not None:
                    lookahead.guesses = guesses
                drafts[sequence] = Guesses(guesses, lookahead)
                load = load.plus_draft(sequence.num_tokens, len(guesses))
        return drafts

    def learn(self, sequence: Sequence, num_guesses: int, num_right: int) -> None:
        """Note what became of a draft."""
        stats = self.stats
        self.stats = DraftStats(
            stats.drafts_total + 1, stats.guesses_total + num_guesses, stats.right_total + num_right
        )
        if sequence.key in self._forced:
            return
        rate = self._rates.get(sequence.key, _FIRST_RATE)
        for right in (1.0,) * num_right + (0.0,) * (num_right < num_guesses):
            rate += _LESSON * (right - rate)
        self._rates[sequence.key] = rate
        if self._model is not None:
            self._model.learn(sequence, num_guesses, num_right)

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Hear which KV blocks of the first cache group are copied before the step, `(from, to)`."""
        if self._model is not None and pairs:
            self._model.copy_blocks(pairs)

    def _guess_together(
        self, model: BatchDrafter, decoding: Seq[Sequence], load: StepLoad, room: int, num_spare: int
    ) -> None:
        """Let a model guess for as many sequences as that pays for. There is room for so many guesses."""
        plain_ms = self._cost_model.predict_ms(load)
        mean = load.decode_pairs // max(len(decoding), 1)
        row_ms = self._cost_model.predict_ms(load.plus_draft(mean, 1)) - plain_ms
        spare_ms = max(min(self._cost_model.max_step_ms - plain_ms, plain_ms), 0.0)
        prices = StepPrices(len(decoding), plain_ms, row_ms, spare_ms)
        counts = model.plan({s: self._rates[s.key] for s in decoding if _has_guesses(s)}, prices)
        for sequence, count in counts.items():
            blocks = sequence.num_blocks
            places = self._cache.extend(sequence, sequence.num_tokens + min(count, room), num_spare)
            counts[sequence] = count = min(count, room, places - sequence.num_tokens)
            room -= count
            if sequence.num_blocks > blocks:
                self.extended.add(sequence.key)
        model.guess({s: count for s, count in counts.items() if count > 0}, prices)

    def ended(self, sequence: Sequence) -> None:
        """Note the end of a sequence."""
        if self._remembering is not None and sequence.search is None:
            self._remembering.ended(sequence)

    def forget(self) -> None:
        """Guess nothing from sequences that have ended."""
        if self._remembering is not None:
            self._remembering.forget()

    def _fits(self, load: StepLoad, sequence: Sequence, count: int, rate: float, token_ms: float) -> bool:
        """Whether so many guesses are no more than a step has time for, and the last of them pays."""
        if self._predict_ms(load, sequence, count) > self._cost_model.max_step_ms:
            return False
        return self._pays(load, sequence, count, rate, token_ms)

    def _pays(self, load: StepLoad, sequence: Sequence, count: int, rate: float, token_ms: float) -> bool:
        """Whether the last of so many guesses, which counts if all are right, takes no more time than it is worth."""
        added_ms = self._predict_ms(load, sequence, count) - self._predict_ms(load, sequence, count - 1)
        return added_ms <= rate**count * token_ms

    def _predict_ms(self, load: StepLoad, sequence: Sequence, count: int) -> float:
        return self._cost_model.predict_ms(load.plus_draft(sequence.num_tokens, count))


def _before_end(sequence: Sequence, guesses: list[int]) -> list[int]:
    """Those before the sequence would end, and no more than there is room for what their rows read."""
    most = sequence.max_length - sequence.num_tokens - 1
    if sequence.sampling.uses_history:
        most = min(most, _MOST_HISTORY // sequence.num_tokens)
    for i, token in enumerate(guesses[:most]):
        if token in sequence.stop_ids:
            return guesses[:i]
    return guesses[:most]


def _has_guesses(sequence: Sequence) -> bool:
    """Whether what a sequence samples depends on its position alone."""
    return sequence.search is None and sequence.constraint is None and not sequence.sampling.uses_history


def _returning(rate: float) -> float:
    return rate + _RETURNING * (_FIRST_RATE - rate) if rate < _FIRST_RATE else rate
