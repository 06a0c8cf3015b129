"""MaskWriter: the masks of a step, written while the device computes the step's logits.

A mask depends on the token before it, so it cannot be made before that token is sampled. It is needed only when the
next forward pass has computed its logits. In between, llguidance works on its own threads, without the GIL. With a
vocabulary of 49,000 tokens, most masks take 5 to 200 microseconds, and a few take some milliseconds. llguidance's
limits end any mask after about 15 ms. A forward pass takes longer than its batch of masks, so it need not wait.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from ..devices.batch import TokenMasks
from ..machine.memory import heap_bytes
from ..outputs import FinishReason
from .constraint import Failure, SequenceConstraint
from .costs import MaskCosts
from .filters import ALL, Mask, mask_words
from .lookahead import Lookahead, timed

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

logger = logging.getLogger(__name__)

_MAX_THREADS = 8
_AT_ONCE = 16  # masks to make before their time is checked
_LOOKAHEAD_S = 0.01  # a step, for masks after draft tokens; the last one that has begun is made


class MaskWriter:
    """Writes masks, for the engine thread. Its threads start with the first grammar."""

    def __init__(self, vocab_size: int) -> None:
        self._words = mask_words(vocab_size)
        # The engine thread is pinned to a core, and what it starts would inherit that.
        processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        self._thread = ThreadPoolExecutor(1, "token-masks", initializer=lambda: _run_on(processors))
        self._num_threads = max(1, min(_MAX_THREADS, (len(processors) if processors else os.cpu_count() or 1) // 2))
        self._executor: LLExecutor | None = None
        self._costs = MaskCosts()

    def start(
        self,
        constraints: Sequence[SequenceConstraint | None],
        lookaheads: Sequence[tuple[int, Lookahead]] = (),
    ) -> TokenMasks | None:
        """The masks of a step's rows, each for one of the constraints; None if none needs one.

        Each of `lookaheads` stands with its draft's first row. The rows after that have no constraint of their own.

        The constraints must not be touched before the masks' `wait` has returned.
        """
        index = np.full(len(constraints), -1, np.int32)
        masked: list[SequenceConstraint] = []
        for row, constraint in enumerate(constraints):
            if constraint is not None and constraint.has_mask:
                index[row] = len(masked)
                masked.append(constraint)
        count, following = len(masked), list[tuple[Lookahead, int]]()
        for row, lookahead in lookaheads:
            following.append((lookahead, count))
            drafted = slice(row + 1, row + 1 + len(lookahead.draft_tokens))
            if index[row] >= 0:
                index[drafted] = np.arange(count, count + len(lookahead.draft_tokens))
            count += len(lookahead.draft_tokens)
        if not count:
            return None
        bits = np.full((count, self._words), ALL, np.uint32)
        matchers = [(matcher, i) for i, c in enumerate(masked) if (matcher := c.matcher()) is not None]
        if matchers:
            return TokenMasks(bits, index, self._thread.submit(self._write, matchers, masked, following, bits).result)
        _restrict(masked, bits)
        self._follow(following, bits)
        return TokenMasks(bits, index) if masked else None

    def close(self) -> None:
        """End the threads."""
        self._thread.shutdown()

    def _write(
        self,
        matchers: list[tuple[LLMatcher, int]],
        constraints: list[SequenceConstraint],
        lookaheads: list[tuple[Lookahead, int]],
        bits: Mask,
    ) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self._num_threads)
        try:
            self._compute(self._executor, matchers, constraints, bits)
        except BaseException as failure:  # a panic in llguidance is not an Exception, and must not fail other requests
            logger.error("llguidance has failed to make masks", exc_info=failure)
            for _, row in matchers:
                message = "the grammar cannot be followed: llguidance has failed"
                constraints[row].failure = Failure(FinishReason.ERROR, message)
        _restrict(constraints, bits)
        try:
            self._follow(lookaheads, bits)
        except BaseException:  # the rows are not used whose masks are missing
            logger.exception("llguidance has failed to follow draft tokens")

    def _follow(self, lookaheads: list[tuple[Lookahead, int]], bits: Mask) -> None:
        """Write the masks after draft tokens as long as there is time. Each draft's masks begin at a row of `bits`."""
        started = time.perf_counter()
        for lookahead, first in lookaheads:
            count = len(lookahead.draft_tokens)
            with timed(lookahead.constraint, count):
                lookahead.follow(bits[first : first + count], started + _LOOKAHEAD_S)
        if lookaheads and self._costs.has_grown():
            for lookahead, _ in lookaheads:
                if (grammar := lookahead.constraint.grammar) is not None:
                    grammar.lookahead.pause()

    def _compute(
        self,
        executor: LLExecutor,
        matchers: list[tuple[LLMatcher, int]],
        constraints: list[SequenceConstraint],
        bits: Mask,
    ) -> None:
        self._costs.begin()
        at, size = bits.ctypes.data, bits.shape[1] * 4
        for first in range(0, len(matchers), _AT_ONCE):
            together = matchers[first : first + _AT_ONCE]
            started = time.perf_counter()
            if len(together) > 1 and not self._costs.is_watching:
                executor.unsafe_compute_mask_ptr(together, at, size, len(bits))
            else:
                for matcher, row in together:
                    before, held = time.thread_time(), heap_bytes() if self._costs.is_watching else 0
                    matcher.unsafe_compute_mask_ptr(at + row * size, size)
                    grown = heap_bytes() - held if self._costs.is_watching else 0
                    self._costs.charge(constraints[row], time.thread_time() - before, grown)
            self._costs.timed(time.perf_counter() - started)
        self._costs.settle()


def _restrict(constraints: list[SequenceConstraint], bits: Mask) -> None:
    for constraint, mask in zip(constraints, bits, strict=False):  # the masks after draft tokens come behind
        constraint.restrict(mask)


def _run_on(processors: set[int] | None) -> None:
    if processors is not None and sys.platform != "darwin":
        os.sched_setaffinity(0, processors)
