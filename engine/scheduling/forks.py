"""Forks: the choices of a request that go on from the end of a prompt which one of them computes for all."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ..cache.manager import CacheManager
from ..sequences.sequence import Sequence, SequenceState
from .waiting import WaitingQueue


class Forks:
    """The choices that wait for a sequence's prompt. They are not in the queue meanwhile."""

    def __init__(self, cache: CacheManager, waiting: WaitingQueue) -> None:
        self._cache = cache
        self._waiting = waiting
        self._forks: dict[int, list[Sequence]] = {}  # by the key of the sequence that they wait for

    def of(self, sequence: Sequence) -> list[Sequence]:
        """Those that wait for a sequence."""
        return [fork for fork in self._forks.get(sequence.key, ()) if fork.state is SequenceState.WAITING]

    def push(self, choices: Seq[Sequence]) -> None:
        """Queue the first of some choices, and let the others wait for it."""
        first, *forks = choices
        if forks:
            self._forks[first.key] = forks
        self._waiting.push(first)

    def start(self, sequence: Sequence, starting: Seq[Sequence]) -> None:
        """A sequence has computed its prompt: let `starting` be where it is, and the others queue to find it cached."""
        for fork in starting:
            self._cache.fork(sequence, fork)
            fork.become(sequence)
        for fork in self._forks.pop(sequence.key, ()):
            if fork.state is SequenceState.WAITING and fork not in starting:
                self._waiting.push(fork)

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended: those that wait for it wait for the first of them."""
        forks = self.of(sequence)
        self._forks.pop(sequence.key, None)
        if forks:
            self.push(forks)
