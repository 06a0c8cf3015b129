"""PromptDelay: how long prompts wait while others run, so that those that come one by one start together."""

from __future__ import annotations

import time
from collections.abc import Callable


class PromptDelay:
    """Holds new prompts back for `factor` times as long as the last step that began a prompt took.

    It is vLLM's `--scheduler-delay-factor`. If no sequence runs, nothing is held back. `clock` gives seconds.
    """

    def __init__(self, factor: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._factor = factor
        self._clock = clock
        self._step_s = 0.0  # of the last step that began a prompt
        self._began: float | None = None  # when that step was planned, if it still runs
        self._waiting_since: float | None = None

    def begin_step(self) -> None:
        """Note that a step is planned, so the one before has ended."""
        if self._began is not None:
            self._step_s, self._began = self._clock() - self._began, None

    def holds(self, *, is_idle: bool) -> bool:
        """Whether waiting prompts have to go on waiting. `is_idle`: no sequence runs."""
        if self._factor == 0.0 or is_idle:
            return False
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
        return now - self._waiting_since < self._factor * self._step_s

    def admitted(self) -> None:
        """Note that the step begins a prompt."""
        if self._factor == 0.0:
            return
        self._waiting_since = None
        if self._began is None:
            self._began = self._clock()
