"""SuffixDrafter: drafts that a sequence goes on as it, or earlier answers, mostly did after the same last tokens.

https://arxiv.org/abs/2411.04975
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .answers import SEPARATOR, Answers
from .drafter import Draftable
from .suffix_options import SuffixOptions

_MAX_TOKENS = 2**20  # of all answers that are kept
_MAX_PLACES = 256  # in the sequence's own text

Tokens = Callable[[NDArray[np.int64]], NDArray[np.int32]]  # those at some positions, SEPARATOR at the ends of texts


class SuffixDrafter:
    """Proposes what most often followed the longest run of last tokens that was seen before.

    It looks in the sequence itself, and in the last answers of requests that had the same cache salt and the same
    adapter. A longer run counts for more: see SuffixOptions. It takes time to look at each token of the sequence, and
    at a bounded number of places.
    """

    def __init__(self, num_tokens: int, options: SuffixOptions, max_context: int | None = None) -> None:
        """It proposes at most `num_tokens`, and has no idea of sequences of more than `max_context` tokens."""
        self._num_tokens = num_tokens
        self._options = options
        self._max_context = max_context
        # The run that leaves room for as many draft tokens as its length allows.
        self._longest = max(int(options.max_tree_depth / (1.0 + options.max_spec_factor)), 1)
        self._answers = Answers(options.max_cached_requests, _MAX_TOKENS) if options.max_cached_requests else None

    def propose(self, sequence: Draftable) -> list[int]:
        """The likely next tokens; none if the last ones are new."""
        count = sequence.num_tokens
        if count < 2 or (self._max_context is not None and count > self._max_context):
            return []
        own = sequence.tokens[:count]
        last = own[-self._longest :][::-1]  # the newest one first
        places = np.flatnonzero(own[:-1] == last[0])[-_MAX_PLACES:][::-1]
        before, behind = len(last), self._num_tokens + 1
        padded = np.full(before + count + behind, SEPARATOR, np.int32)
        padded[before : before + count] = own
        draft_tokens, score = self._followed(lambda positions: padded[positions + before], places, last, 1)
        if self._answers is not None and len(self._answers) and len(last) > 1:
            places = self._answers.places(_owner(sequence), int(last[1]), int(last[0]))
            others, other_score = self._followed(self._answers.at, places, last, 0)
            if other_score > score:
                return others
        return draft_tokens

    def ended(self, sequence: Draftable) -> None:
        """Keep the answer for others."""
        if self._answers is not None:
            self._answers.add(_owner(sequence), sequence.tokens[sequence.prompt_len : sequence.num_tokens])

    def forget(self) -> None:
        """Forget the answers of sequences that have ended."""
        if self._answers is not None:
            self._answers.clear()

    def _followed(
        self, at: Tokens, places: NDArray[np.int64], last: NDArray[np.int32], length: int
    ) -> tuple[list[int], float]:
        """What followed, and how many of these tokens are expected to be right.

        At least the first `length` tokens of `last` stand at `places`.
        """
        if not len(places):
            return [], 0.0
        run = at(places[:, None] - np.arange(length, len(last)))
        more = np.logical_and.accumulate(run == last[length:], axis=1).sum(axis=1)
        longest = int(more.max())
        length += longest
        options = self._options
        most = min(self._num_tokens, int(options.max_spec_factor * length), options.max_tree_depth - length)
        if most < 1:
            return [], 0.0
        following = at(places[more == longest, None] + np.arange(1, most + 1))
        draft_tokens: list[int] = []
        probability, score = 1.0, 0.0
        while True:
            agreed = _agreed(following[:, len(draft_tokens) :])
            draft_tokens += agreed
            score += probability * len(agreed)
            if len(draft_tokens) == most:
                break
            column = following[:, len(draft_tokens)]
            token, count = _commonest(column)
            probability *= count / len(column)
            if token == SEPARATOR or probability < options.min_token_prob:
                break
            draft_tokens.append(token)
            score += probability
            following = following[column == token]
        return draft_tokens, score


def _owner(sequence: Draftable) -> int:
    """The same number for sequences that may know of each other's text."""
    return int.from_bytes(sequence.identity.root[:8], "little")


def _agreed(rows: NDArray[np.int32]) -> list[int]:
    """The tokens that all rows begin with, up to the end of a text."""
    differ = (rows != rows[0]).any(axis=0) | (rows[0] == SEPARATOR)
    count = int(differ.argmax()) if differ.any() else len(differ)
    tokens: list[int] = rows[0, :count].tolist()
    return tokens


def _commonest(tokens: NDArray[np.int32]) -> tuple[int, int]:
    """The token that stands there most often, and how often. The first of several is the newest."""
    return Counter(tokens.tolist()).most_common(1)[0]
