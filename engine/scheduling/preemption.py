"""Preemption: who makes way when blocks run out."""

from __future__ import annotations

from collections.abc import Callable, Set
from collections.abc import Sequence as Seq

from ..cache.manager import CacheManager
from ..devices.limits import ExecutorLimits
from ..sequences.sequence import Sequence, SequenceState
from .beams import Beams
from .prompts import Prompts
from .running import Running
from .step import Step
from .waiting import WaitingQueue


class MustWaitError(Exception):
    """A sequence has to be preempted. That has to wait until all steps that were started have ended."""


class Preemption:
    """Takes blocks from the last in order for those before it, one sequence after the other, or one whole search.

    A preempted sequence keeps its tokens and waits; a search starts over.
    """

    def __init__(
        self,
        cache: CacheManager,
        limits: ExecutorLimits,
        *,
        running: Running,
        waiting: WaitingQueue,
        beams: Beams,
        prompts: Prompts,
    ) -> None:
        """`total` is the number of preemptions, and `num_in_flight` the number of steps that have not ended.

        The sequence to preempt may be in such a step. So all methods raise MustWaitError instead while there are any.
        """
        self.total = self.num_in_flight = 0
        self._cache = cache
        self._chunked_prefill = limits.chunked_prefill
        self._running = running
        self._waiting = waiting
        self._beams = beams
        self._prompts = prompts

    def make_way(self, step: Step) -> None:
        """Preempt running sequences of a lower priority than one that waits and could not run otherwise."""
        while (head := self._waiting.peek()) is not None and self._running:
            last = self._running.last()
            if last.priority <= head.priority or self._prompts.can_admit(head, self._cache.cached(head)):
                return
            self._preempt(last, step)

    def make_room_for_prompts(self, step: Step) -> None:
        """See to it that prompts already begun can go on, the first in order before all others."""
        for sequence in list(self._running.prefilling):
            end = sequence.num_computed + 1 if self._chunked_prefill else sequence.num_tokens
            while sequence.state is SequenceState.PREFILLING and self._cache.ensure_slots(sequence, end) < end:
                last = self._running.last()
                if last is sequence:
                    return
                self._preempt(last, step)

    def make_room(self, step: Step, choose: Callable[[], Seq[Sequence]]) -> Set[int]:
        """See to it that each sequence that decodes has a block of its own to write to; keys of those whose are new.

        `choose` gives those who decode.
        """
        while True:
            short, sharing = self._cache.blocks_needed(choose())
            if len(short) + len(sharing) <= self._cache.num_free:
                break
            self._preempt(self._running.last(), step)
        step.copies, moved = self._cache.allocate_needed(short, sharing)
        return moved

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        if self.num_in_flight:
            raise MustWaitError
        search = sequence.search
        for preempted in [sequence] if search is None else self._beams.live(search):
            self._running.remove(preempted)
            self._cache.release(preempted)
        if search is not None:
            sequence = self._beams.restart(search)
        self._waiting.push(sequence)
        self.total += 1
        step.preempted.append(sequence.key)
