"""Lookahead: the masks of a draft's rows, each after the draft tokens before it.

A copy of the sequence's constraint follows the draft tokens. So a rejected draft token leaves no trace in
the constraint, not even if the grammar reaches a limit with it. A copy takes 3 to 100 microseconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..devices.batch import TokenMasks
from .constraint import SequenceConstraint
from .filters import Mask

logger = logging.getLogger(__name__)


class Lookahead:
    """Follows the draft tokens of one draft.

    `num_rows` of the draft's rows have their masks. The first one is the sequence's own, and `follow` adds others. What
    is sampled in the rest says nothing.
    """

    __slots__ = ("_copied", "_has_mask", "_has_rules", "draft_tokens", "num_rows")

    def __init__(self, constraint: SequenceConstraint, draft_tokens: list[int]) -> None:
        """The draft tokens are cut before the first that the grammar forbids. For the engine thread."""
        self.num_rows = 1
        self._copied = constraint.copied()
        self._has_mask, self._has_rules = constraint.has_mask, constraint.has_rules
        matcher = self._copied.matcher()
        self.draft_tokens = draft_tokens if matcher is None else draft_tokens[: matcher.validate_tokens(draft_tokens)]

    @property
    def constraint(self) -> SequenceConstraint:
        """The copy that follows the draft tokens."""
        return self._copied

    def follow(self, masks: Mask, until: float) -> None:
        """Write the masks of the rows after the first, shape [draft tokens, W], until `time.perf_counter()` is `until`.

        It ends before a row that the sequence does not reach, since the grammar is complete or cannot go on, and before
        one where masks or the grammar begin or end, as they do after reasoning.
        """
        copied = self._copied
        for draft, mask in zip(self.draft_tokens, masks, strict=True):
            copied.advance(draft)
            is_alike = copied.has_mask is self._has_mask and copied.has_rules is self._has_rules
            if copied.is_terminated or not is_alike:
                return
            if self._has_mask:
                if (matcher := copied.matcher()) is not None:
                    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                copied.restrict(mask)
            if copied.failure is not None:
                return
            self.num_rows += 1
            if time.perf_counter() > until:
                return


def jump_forward_tokens(constraint: SequenceConstraint) -> list[int]:
    """The next tokens that the grammar leaves no choice about. The mask of the first is ready then.

    For the engine thread. It does the work of that mask early: no more work in total, but on the engine thread.
    """
    grammar, matcher = constraint.grammar, constraint.matcher()
    if grammar is None or matcher is None:
        return []
    with timed(constraint, 1):
        tokens: list[int] = matcher.compute_ff_tokens()
    return tokens


def first_masks(constraints: Sequence[SequenceConstraint | None], until: float) -> TokenMasks | None:
    """Masks of each one's next token, those that are ready when `time.perf_counter()` is `until`; None: all may follow.

    For the engine thread. A copy of each constraint makes its mask, so no failure or limit stays in the constraint.
    """
    index = np.full(len(constraints), -1, np.int32)
    masks: list[Mask] = []
    for row, constraint in enumerate(constraints):
        if constraint is None or not constraint.has_mask or time.perf_counter() > until:
            continue
        try:
            with timed(constraint, 1):
                mask = constraint.copied().next_mask()
        except BaseException:  # a panic in llguidance is not an Exception; draft tokens without a mask are cut later
            logger.exception("llguidance has failed to make the mask of a draft token")
            continue
        if mask is not None:
            index[row] = len(masks)
            masks.append(mask)
    return TokenMasks(np.array(masks, np.uint32), index) if masks else None


def may_look_ahead(constraint: SequenceConstraint) -> bool:
    """Whether draft tokens may be followed: if there is a grammar, that must not have taken long just now."""
    return constraint.grammar is None or constraint.grammar.lookahead.may_begin()


@contextmanager
def timed(constraint: SequenceConstraint, num_masks: int) -> Iterator[None]:
    """Charge the grammar with the processor time of looking ahead, which may make up to `num_masks` masks."""
    started = time.thread_time()
    yield
    if constraint.grammar is not None:
        constraint.grammar.lookahead.charge(time.thread_time() - started, num_masks)
