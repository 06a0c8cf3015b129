"""SuffixDrafter: guesses that a sequence goes on as it, or earlier answers, mostly did after the same last tokens.

https://arxiv.org/abs/2411.04975
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..scheduling.drafter import Draftable
from ..suffix_options import SuffixOptions
from .answers import SEPARATOR, Answers

_MOST_TOKENS = 2**20  # of all answers that are kept
_MOST_PLACES = 256  # in the sequence's own text

Tokens = Callable[[NDArray[np.int64]], NDArray[np.int32]]  # the tokens at some positions, SEPARATOR behind the end


class SuffixDrafter:
    """Proposes what most often followed the longest run of last tokens that was seen before.

    It looks in the sequence itself, and in the last answers of requests that had the same cache salt and the same
    adapter. A longer run counts for more: see SuffixOptions. The time is that of a look at each token of the sequence,
    and at a bounded number of places.
    """

    def __init__(self, num_tokens: int, options: SuffixOptions, most_context: int | None = None) -> None:
        """It proposes at most `num_tokens`, and has no idea of sequences of more than `most_context` tokens."""
        self._num_tokens = num_tokens
        self._options = options
        self._most_context = most_context
        # The run that leaves room for as many guesses as its length allows.
        self._longest = max(int(options.max_tree_depth / (1.0 + options.max_spec_factor)), 1)
        self._answers = Answers(options.max_cached_requests, _MOST_TOKENS) if options.max_cached_requests else None

    def propose(self, sequence: Draftable) -> list[int]:
        """The likely next tokens; none if the last ones are new."""
        count = sequence.num_tokens
        if count < 2 or (self._most_context is not None and count > self._most_context):
            return []
        own = sequence.tokens[:count]
        last = own[-self._longest :][::-1].tolist()  # the newest one first
        places = np.flatnonzero(own[:-1] == last[0])[-_MOST_PLACES:][::-1]
        padded = np.append(own, np.int32(SEPARATOR))

        def own_at(positions: NDArray[np.int64]) -> NDArray[np.int32]:
            return padded[np.where(positions < 0, count, np.minimum(positions, count))]

        guesses, score = self._followed(own_at, places, last, 1)
        if self._answers is not None and len(self._answers) and len(last) > 1:
            places = self._answers.places(_owner(sequence), last[1], last[0])
            others, other_score = self._followed(self._answers.at, places, last, 0)
            if other_score > score:
                return others
        return guesses

    def ended(self, sequence: Draftable) -> None:
        """Keep the answer for others."""
        if self._answers is not None:
            self._answers.add(_owner(sequence), sequence.tokens[sequence.prompt_len : sequence.num_tokens])

    def forget(self) -> None:
        """Keep no answer of those that have ended."""
        if self._answers is not None:
            self._answers.clear()

    def _followed(self, at: Tokens, places: NDArray[np.int64], last: list[int], length: int) -> tuple[list[int], float]:
        """What followed, and how many of these tokens are expected to be right.

        The first `length` tokens of `last` stand at `places`.
        """
        while len(places) and length < len(last):
            longer = places[at(places - length) == last[length]]
            if not len(longer):
                break
            places, length = longer, length + 1
        if not length:
            return [], 0.0
        options = self._options
        most = min(self._num_tokens, int(options.max_spec_factor * length), options.max_tree_depth - length)
        guesses: list[int] = []
        probability, score = 1.0, 0.0
        while len(places) and len(guesses) < most:
            following = at(places + len(guesses) + 1)
            token, count = _commonest(following)
            probability *= count / len(places)
            if token == SEPARATOR or probability < options.min_token_prob:
                break
            guesses.append(token)
            score += probability
            places = places[following == token]
        return guesses, score


def _owner(sequence: Draftable) -> int:
    """The same number for sequences that may know of each other's text."""
    return int.from_bytes(sequence.identity.root[:8], "little")


def _commonest(tokens: NDArray[np.int32]) -> tuple[int, int]:
    """The token that stands there most often, and how often. The first of several is the newest."""
    first = int(tokens[0])
    if len(tokens) == 1 or (tokens == first).all():
        return first, len(tokens)
    values, firsts, counts = np.unique(tokens, return_index=True, return_counts=True)
    best = int(np.lexsort((firsts, -counts))[0])
    return int(values[best]), int(counts[best])
