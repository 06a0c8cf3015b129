"""StageTimes: which stage takes longest, said in the log when the others wait for it much."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_EVERY_S = 60.0
_FEWEST_STEPS = 100
_LAGGING = 1.25  # times the mean of all stages


class StageTimes:
    """Sums up what the stages took for their steps, in seconds."""

    def __init__(self, names: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._names, self._clock = names, clock
        self._begin()

    def observe(self, seconds: NDArray[np.float64]) -> None:
        """What each stage took for a step. Once in a while, a stage that lags behind the others is named."""
        self._sums += seconds
        self._steps += 1
        if self._steps >= _FEWEST_STEPS and self._clock() - self._begun >= _EVERY_S:
            self._report()
            self._begin()

    def _begin(self) -> None:
        self._begun, self._steps, self._sums = self._clock(), 0, np.zeros(len(self._names))

    def _report(self) -> None:
        slowest, means = int(self._sums.argmax()), self._sums / self._steps * 1e3
        if means[slowest] > _LAGGING * means.mean():
            logger.warning(
                "%s takes %.1f ms a step, and all stages %.1f ms on average: move layers away from it with "
                "--pipeline-split, or give it more cores with --threads-bind",
                self._names[slowest],
                means[slowest],
                means.mean(),
            )
