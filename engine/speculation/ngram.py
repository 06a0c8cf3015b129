"""NgramDrafter: expects a sequence to go on as it did where its last tokens stood before.

Answers that repeat what is in front of them (edited code, quoted facts, fields of JSON) are drafted well. Others are
not drafted: https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import numpy as np

from .drafter import Draftable

# Of the places where the last token stood before, only the last ones are looked at, because there may be very many.
_MAX_PLACES = 4096


class NgramDrafter:
    """Proposes at most `num_tokens`: those that followed when the longest run of last tokens was last seen.

    Such a run has `shortest` to `longest` tokens. It takes time to look at each token of the sequence, and at up to
    `longest` tokens before each of a bounded number of places.
    """

    def __init__(self, num_tokens: int, longest: int, shortest: int, max_context: int | None = None) -> None:
        """It proposes nothing for sequences of more than `max_context` tokens."""
        self._num_tokens = num_tokens
        self._longest = longest
        self._shortest = shortest
        self._max_context = max_context

    def propose(self, sequence: Draftable) -> list[int]:
        """The likely next tokens; none if the last ones are new."""
        if self._max_context is not None and sequence.num_tokens > self._max_context:
            return []
        tokens = sequence.tokens[: sequence.num_tokens]
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])[-_MAX_PLACES:]  # where a run like the last one may end
        length = 1
        while len(ends) and length < self._longest:
            longer = ends[ends >= length]  # those with a token before the run
            longer = longer[tokens[longer - length] == tokens[-1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if not len(ends) or length < self._shortest:
            return []
        # The last one that is followed by enough, else the one that is followed by most.
        followed = int(np.count_nonzero(ends < len(tokens) - self._num_tokens))
        end = int(ends[max(followed - 1, 0)])
        draft_tokens: list[int] = tokens[end + 1 : end + 1 + self._num_tokens].tolist()
        return draft_tokens
