"""Hosted: one unit as the host keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..errors import TidewheelError
from .units import STAGES, Loaded, Needs, Progress, Report, State, Unit, UnitStatus


class Waiter:
    """A request that waits for a unit. `turn` becomes what it leases."""

    def __init__(self, report: Report | None) -> None:
        self.turn: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._report = report

    def report(self, progress: Progress) -> None:
        """Tell it; if that raises, the request alone fails."""
        try:
            if self._report is not None:
                self._report(progress)
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End its waiting."""
        if not self.turn.done():
            self.turn.set_exception(error)

    @property
    def was_granted(self) -> bool:
        """Whether it has a lease."""
        return self.turn.done() and not self.turn.cancelled() and self.turn.exception() is None


class Hosted:
    """A unit's state, and who uses it and waits for it. The host alone changes it."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.name = unit.name
        self.state = State.UNLOADED
        self.needs: Needs | None = None
        self.error: str | None = None  # without the exception, whose frames hold what was half loaded
        self.progress: Progress | None = None
        self.loaded: Loaded | None = None
        self.task: asyncio.Task[Any] | None = None  # which loads or unloads it
        self.held_bytes: int | None = None  # of the budget; None: it has no room
        self.leases = 0
        self.waiters: dict[Waiter, None] = {}
        self.closing = 0  # who waits for it to be unloaded: it gives no leases
        self.gone = asyncio.Event()  # set while it is not loaded
        self.gone.set()
        self.keep_alive_s: float | None = None  # as the last request that said so wants it
        self.last_used = 0.0
        self.expires_at: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.loaded_at: float | None = None
        self.turn_ends = 0.0  # until when it need not make room for others

    @property
    def is_dead(self) -> bool:
        """Whether its engine has ended by itself."""
        return self.loaded is not None and self.loaded.failure is not None

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded, and nobody uses it."""
        return self.state is State.LOADED and not self.leases

    def grant(self) -> None:
        """Lend it to all who wait."""
        assert self.loaded is not None
        for waiter in self.waiters:
            if not waiter.turn.done():
                self.leases += 1
                waiter.turn.set_result(self.loaded)
        self.waiters.clear()
        if self.leases:
            self.stop_timer()

    def fail_waiters(self, error: Callable[[], Exception]) -> None:
        """End all waiting. Each request gets an error of its own, for tracebacks grow."""
        for waiter in self.waiters:
            waiter.fail(error())
        self.waiters.clear()

    def advance_progress(self, progress: Progress) -> bool:
        """Take over how far it is; False if it is no further than it was."""
        before = self.progress or Progress("waiting", -1.0)
        stage = max(before.stage, progress.stage, key=STAGES.index)
        now = Progress(stage, min(max(before.fraction, progress.fraction, 0.0), 1.0))
        if now == before:
            return False
        self.progress = now
        return True

    @property
    def keep_s(self) -> float | None:
        """For how many seconds it is kept when nobody uses it; None: as long as nobody needs its room."""
        keep_s = self.unit.idle_s if self.keep_alive_s is None else self.keep_alive_s
        return None if self.unit.pinned or keep_s is None or keep_s < 0 else keep_s

    def stop_timer(self) -> None:
        """It is in use, or gone."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.expires_at = None

    @property
    def error_text(self) -> str | None:
        """Why it could not be loaded, or what has ended its engine."""
        failure = None if self.loaded is None else self.loaded.failure
        return self.error if failure is None else failure_text(failure)

    def status(self) -> UnitStatus:
        """See UnitStatus. An engine that has died is a failure, though the host has not unloaded it yet."""
        return UnitStatus(
            name=self.name,
            state=State.FAILED if self.state is State.LOADED and self.is_dead else self.state,
            pinned=self.unit.pinned,
            needs=self.needs,
            error=self.error_text,
            progress=self.progress,
            leases=self.leases,
            waiting=len(self.waiters),
            expires_at=self.expires_at,
            loaded_at=self.loaded_at,
        )


def failure_text(error: BaseException) -> str:
    """For people who see no log. What was not foreseen is in the log alone."""
    if isinstance(error, TidewheelError):
        return str(error)
    return f"an unexpected {type(error).__name__}; the log says more"
