"""Drafts: guesses at the tokens to come, run in the step of the token before them and kept where they were right.

So one step may give a sequence several tokens (speculative decoding, https://arxiv.org/abs/2211.17192). Each guess is
compared with the token that the sequence samples at its place, with the seed and position of that place: the tokens are
those without drafts. K and V of wrong guesses stay behind the computed tokens until others are written over them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from ..cache.manager import CacheManager
from .cost_model import CostModel, StepLoad
from .sequence import Sequence


class Drafter(Protocol):
    """Guesses how sequences go on."""

    def propose(self, sequence: Sequence) -> list[int]:
        """The likely next tokens of a sequence, of the model's vocabulary; none if it has no idea.

        Called on the engine thread before every step that the sequence decodes in.
        """
        ...


class Drafts:
    """Takes from a drafter what a step has room for.

    Beams, and sequences with constraints or penalties, get no draft: what they sample depends on more than their
    position, and would have to be known for each guess.
    """

    def __init__(
        self, drafter: Drafter, cache: CacheManager, cost_model: CostModel, max_num_batched_tokens: int
    ) -> None:
        self._drafter = drafter
        self._cache = cache
        self._cost_model = cost_model
        self._max_num_batched_tokens = max_num_batched_tokens

    def choose(self, decoding: Seq[Sequence], load: StepLoad, num_spare: int) -> dict[Sequence, list[int]]:
        """Guesses for those of `decoding` that get any; they have blocks for them then. `load` is that without guesses.

        They take none of the last `num_spare` free blocks, no more time than a step may take, and half of the tokens
        that it has left: prompts get the other half.
        """
        drafts: dict[Sequence, list[int]] = {}
        most = (load.num_tokens + self._max_num_batched_tokens) // 2
        for sequence in decoding:
            guesses = self._guesses(sequence)[: most - load.num_tokens]
            while guesses and self._predict_ms(load, sequence, guesses) > self._cost_model.max_step_ms:
                guesses.pop()
            if not guesses:
                continue
            room = self._cache.extend(sequence, sequence.num_tokens + len(guesses), num_spare) - sequence.num_tokens
            if guesses := guesses[:room]:
                drafts[sequence] = guesses
                load = load.plus_draft(sequence.num_tokens, len(guesses))
        return drafts

    def _guesses(self, sequence: Sequence) -> list[int]:
        """What the drafter proposes, up to where the sequence would end."""
        if sequence.search is not None or sequence.constraint is not None or sequence.sampling.uses_history:
            return []
        guesses = self._drafter.propose(sequence)[: sequence.max_length - sequence.num_tokens - 1]
        for i, token in enumerate(guesses):
            if token in sequence.stop_ids:
                return guesses[:i]
        return guesses

    def _predict_ms(self, load: StepLoad, sequence: Sequence, guesses: list[int]) -> float:
        return self._cost_model.predict_ms(load.plus_draft(sequence.num_tokens, len(guesses)))
