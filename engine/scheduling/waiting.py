"""WaitingQueue: the sequences that do not run, first come, first served within a priority."""

from __future__ import annotations

import heapq

from .sequence import Sequence, SequenceState

_STALE_ENTRIES = 64  # entries of sequences that wait no more, which the queue may keep


class WaitingQueue:
    """A heap by `Sequence.order`. A sequence that has ended meanwhile is dropped when it is met."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait."""
        heapq.heappush(self._heap, (sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """The first in order; it stays."""
        while self._heap and self._heap[0][1].state is not SequenceState.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """The first in order, which `peek` has just found."""
        return heapq.heappop(self._heap)[1]

    def sequences(self) -> list[Sequence]:
        """All that wait, in no order."""
        return [sequence for _, sequence in self._heap if sequence.state is SequenceState.WAITING]

    def shrink(self, num_waiting: int) -> None:
        """Drop those that have ended, if there are many more than the `num_waiting` that have not."""
        if len(self._heap) > 2 * num_waiting + _STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1].state is SequenceState.WAITING]
            heapq.heapify(self._heap)
