"""StepWatchdog: writes every thread's stack when a step takes far too long."""

from __future__ import annotations

import faulthandler
import logging
import threading
import time

from .loop import EngineLoop

logger = logging.getLogger(__name__)

_STDERR = 2
_REPEAT_S = 60.0


class StepWatchdog:
    """Writes all threads' stacks to stderr if a step runs for more than `timeout_s`, at most once a minute.

    It does not end the step: the operator decides what to do.
    """

    def __init__(self, loop: EngineLoop, timeout_s: float) -> None:
        self.stalled_steps_total = 0
        self._loop = loop
        self._timeout_s = timeout_s
        self._poll_s = min(timeout_s / 4, 1.0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidewheel-watchdog", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: the thread has ended when this returns."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        stalled: float | None = None  # when the step that was last reported began
        reported = -_REPEAT_S
        while not self._stopped.wait(self._poll_s):
            began, now = self._loop.step_started, time.perf_counter()
            if began is None or now - began <= self._timeout_s:
                continue
            if began != stalled:
                stalled = began
                self.stalled_steps_total += 1
            if now - reported >= _REPEAT_S:
                reported = now
                logger.error("A step has run for %.0f s (--step-timeout); the stacks of all threads:", now - began)
                faulthandler.dump_traceback(_STDERR, all_threads=True)
