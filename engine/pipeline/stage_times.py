"""StageTimes: what each stage does with its time. One that the others wait for much is named in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_EVERY_S = 60.0
_FEWEST_STEPS = 100
_LAGGING = 1.25  # times the mean of all stages


class StageStats(Struct, frozen=True):
    """Totals of a stage since the start. `hops` are those whose time is known, from this stage to the next process."""

    name: str
    steps: int
    computing_s: float
    hops: int
    hop_s: float


class PipelineStats(Struct, frozen=True):
    """Statistics of the stages since the start, and how often all of them were started again."""

    stages: Sequence[StageStats]
    restarts: int


class StageTimes:
    """Sums up what the stages took for their steps, in seconds."""

    def __init__(
        self, names: Sequence[str], *, share_clock: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`share_clock`: times of different stages may be compared."""
        self._names, self._clock, self._share_clock = names, clock, share_clock
        # Of each stage: steps, seconds of computing, hops, seconds of them. Replaced, so that readers see whole ones.
        self._totals: NDArray[np.float64] = np.zeros((len(names), 4))
        self._begin()

    def observe(self, times: NDArray[np.float64], sent: float, received: float | None) -> None:
        """The times of a step: when it came, began and ended on each stage, `[stages, 3]`.

        A step that had come before it was looked for has NaN there, or None as the time when it was `received` from
        the last stage. It was `sent` to the first one. Once in a while, a stage that lags behind the others is named.
        """
        seconds = times[:, 2] - times[:, 1]
        totals = self._totals.copy()
        totals[:, 0] += 1
        totals[:, 1] += seconds
        hops = self._hops(times, sent, np.nan if received is None else received)
        known = np.isfinite(hops)
        totals[known, 2] += 1
        totals[known, 3] += hops[known]
        self._totals = totals
        self._sums += seconds
        self._steps += 1
        if self._steps >= _FEWEST_STEPS and self._clock() - self._begun >= _EVERY_S:
            self._report()
            self._begin()

    def stats(self) -> list[StageStats]:
        """The statistics of each stage, in order. From any thread."""
        return [
            StageStats(name, int(steps), computing_s, int(hops), hop_s)
            for name, (steps, computing_s, hops, hop_s) in zip(self._names, self._totals.tolist(), strict=True)
        ]

    def _hops(self, times: NDArray[np.float64], sent: float, received: float) -> NDArray[np.float64]:
        """From each stage to the next, and from the last one back; NaN where it is not known."""
        if self._share_clock:
            return np.append(times[1:, 0], received) - times[:, 2]
        # Each clock measures its own part. What is left of the whole was spent between them.
        between = received - sent - (times[:, 2] - times[:, 0]).sum()
        return np.full(len(times), between / (len(times) + 1))

    def _begin(self) -> None:
        self._begun, self._steps, self._sums = self._clock(), 0, np.zeros(len(self._names))

    def _report(self) -> None:
        slowest, means = int(self._sums.argmax()), self._sums / self._steps * 1e3
        if means[slowest] > _LAGGING * means.mean():
            logger.warning(
                "%s takes %.1f ms a step, and all stages %.1f ms on average: move layers away from it with "
                "--pipeline-split%s",
                self._names[slowest],
                means[slowest],
                means.mean(),
                # Stages on several machines have as many cores as each other.
                ", or give it more cores with --threads-bind" if self._share_clock else "",
            )
