"""Cancellation: one thread tells another that the model it is loading is no longer wanted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class LoadCancelledError(Exception):
    """Ends a load that was cancelled. Not a TidewheelError, because the caller who cancels expects it."""


class Cancellation:
    """Can be cancelled once, from any thread, and stays cancelled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._actions: list[Callable[[], object]] = []

    def cancel(self) -> None:
        """Make `check` raise from now on, and call the action of `calling`."""
        with self._lock:
            actions = [] if self._cancelled else self._actions
            self._cancelled = True
            for action in actions:
                action()

    def check(self) -> None:
        """Raise LoadCancelledError if it was cancelled."""
        if self._cancelled:
            raise LoadCancelledError

    def wait(self, seconds: float) -> None:
        """Let time pass. Raises LoadCancelledError at once if it is or was cancelled."""
        cancelled = threading.Event()
        with self.calling(cancelled.set):
            cancelled.wait(seconds)
        self.check()

    @contextlib.contextmanager
    def calling(self, action: Callable[[], object]) -> Iterator[None]:
        """A context in which `action` is called, once, if it is or was cancelled. For work that cannot `check`."""
        with self._lock:
            self._actions.append(action)
            if self._cancelled:
                action()
        try:
            yield
        finally:
            with self._lock:
                self._actions.remove(action)
