"""SideWork: what the engine thread computes between the model's steps, on the same threads, piece by piece."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

# Of a piece: about as long as a step of a small model; and where no sequence waits for the next step. Longer pieces
# read the weights less often.
_PIECE_S, _ALONE_PIECE_S = 0.005, 0.04
_SHARE = 0.25  # of --max-step-ms, between two steps
_ALONE_TURN_S = 0.01  # after which the piece that runs is the last one, where no sequence waits


class SideWork(ABC):
    """Work that is done in pieces: images to encode, texts to embed.

    Everything is called on the engine thread. Pieces of other work, and steps, run between any two pieces. How long
    the pieces are changes no bit of the results.
    """

    @property
    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether anything is left to compute. The engine thread does not rest as long as there is."""

    @abstractmethod
    def run_piece(self, piece_s: float, *, nothing_runs: bool) -> bool:
        """Compute for about `piece_s` seconds, and pass on what is finished; False if nothing may be computed now.

        `nothing_runs`: no sequence waits for the next step, so what waits for the end of one would wait for ever.
        """

    @abstractmethod
    def close(self, failure: BaseException | None = None) -> None:
        """Free everything. `failure` is what has ended the engine thread, if it has not been stopped."""


class SideWorkTurns:
    """Kinds of side work take turns by the time that they took. What had nothing to do does not make up for it."""

    def __init__(self, max_step_ms: float) -> None:
        """All together take a share of `max_step_ms` between two steps."""
        self._share_s = max_step_ms / 1e3 * _SHARE
        self._used_s: dict[SideWork, float] = {}
        self._level_s = 0.0  # no work that waits has used less

    def add(self, work: SideWork) -> None:
        """Let this work take its turns, too."""
        self._used_s[work] = self._level_s

    @property
    def is_waiting(self) -> bool:
        """Whether anything is left to compute."""
        return any(work.is_waiting for work in self._used_s)

    def run(self, *, nothing_runs: bool) -> float:
        """Compute what waits, in pieces, until the time is over. Returns the seconds that it took.

        Whoever comes while `nothing_runs` waits for about one of the longer pieces.
        """
        turn_s = _ALONE_TURN_S if nothing_runs else self._share_s
        started = now = time.perf_counter()
        while (work := self._run_piece(nothing_runs=nothing_runs)) is not None:
            ended = time.perf_counter()
            self._used_s[work] += ended - now
            now = ended
            if now - started >= turn_s:
                break
        return now - started

    def close(self, failure: BaseException | None = None) -> None:
        """Close all work. Calling it twice is allowed."""
        for work in self._used_s:
            work.close(failure)
        self._used_s.clear()

    def _run_piece(self, *, nothing_runs: bool) -> SideWork | None:
        """Whose piece was run; None if nothing could be computed."""
        piece_s = _ALONE_PIECE_S if nothing_runs else _PIECE_S
        waiting = [work for work in self._used_s if work.is_waiting]
        for work in waiting:
            self._used_s[work] = max(self._used_s[work], self._level_s)
        for work in sorted(waiting, key=self._used_s.__getitem__):
            if work.run_piece(piece_s, nothing_runs=nothing_runs):
                self._level_s = self._used_s[work]
                return work
        return None
