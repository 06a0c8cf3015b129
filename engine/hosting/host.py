"""ModelHost: loads the models that are asked for, and unloads others to make room for them.

It lives on the event loop. A unit goes round through UNLOADED, LOADING, LOADED and UNLOADING. A load that fails ends in
FAILED, which is UNLOADED with a reason. What takes long is done by a unit's task: it plans, waits in line for room and
loads, or it closes what was loaded. All else is done at once: `_advance` for a unit, and `_make_room` for the line.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import Any, TypeVar
from weakref import WeakSet

from ..errors import BusyError, EngineDeadError, ModelError, TidewheelError, quoted
from .budget import MemoryBudget
from .events import EventReader
from .hosted import Hosted, Waiter, failure_text
from .room import Room, refusal, victims_for
from .units import (
    Event,
    Loaded,
    LoadFailedError,
    NotHostedError,
    Progress,
    Report,
    State,
    Unit,
    UnitBusyError,
    UnitStatus,
)

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_LOOK_S = 0.02
_LONGEST_WRITE_S = 60.0  # half of the time for which a request waits for room
_LONGEST_TIMER_S = 86400.0  # longer ones overflow in some event loops


class ModelHost:
    """Which units are loaded. A unit with leases stays loaded; of the others, those that were not used for longest make
    room for what is asked for.

    Loads wait for room in the order in which they were asked for; one that fits beside those before it goes first. If
    units that run requests have the room, they keep it until their turn is over: `turn_s` seconds, or as long as their
    load took, if that is longer. Then new requests for them wait, so that they come to an end even under steady load.
    A unit whose last request is done gives up its turn if no other one comes within `linger_s` seconds.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        budget: MemoryBudget,
        *,
        max_loaded: int | None = None,
        wait_s: float = 120.0,
        turn_s: float = 10.0,
        linger_s: float = 0.1,
        max_waiting: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """At most `max_loaded` units are loaded at a time; None: as many as fit.

        A request waits for up to `wait_s` seconds until its load begins. At most `max_waiting` requests wait.
        """
        self._budget, self._max_loaded = budget, sys.maxsize if max_loaded is None else max_loaded
        self._wait_s, self._max_waiting = wait_s, max_waiting
        self._turn_s, self._linger_s = turn_s, linger_s
        self._clock = clock
        self._units: dict[str, Hosted] = {}
        self._removed: set[Hosted] = set()  # that are not gone yet
        self._line: dict[Hosted, asyncio.Future[None]] = {}  # planned, and waiting for room
        self._held: set[Hosted] = set()  # in use, and lent no more until the line's first has its room
        self._turn_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._readers: WeakSet[EventReader] = WeakSet()
        self._num_waiting = 0
        self._stopped = False
        for unit in units:
            self.add(unit)

    def add(self, unit: Unit) -> None:
        """Serve one more. Raises ModelError if its name is taken."""
        if unit.name in self._units:
            raise ModelError(f"two models are named {quoted(unit.name)}: give one of them another name")
        self._units[unit.name] = Hosted(unit)

    def remove(self, name: str) -> Awaitable[object]:
        """Serve it no more. What is returned waits until those who use it are done and it is unloaded.

        Raises NotHostedError.
        """
        unit = self._find(name)
        del self._units[name]
        self._removed.add(unit)
        unit.closing += 1
        unit.fail_waiters(partial(_not_hosted, name))
        self._end(unit)
        return unit.gone.wait()

    @asynccontextmanager
    async def lease(
        self, name: str, *, keep_alive_s: float | None = None, report: Report | None = None
    ) -> AsyncIterator[Loaded]:
        """A unit, which stays loaded meanwhile; it is loaded first if it has to be. All who wait share one load.

        `keep_alive_s` says how long it is kept when nobody uses it any more: 0 not at all, a negative number until room
        is needed; None leaves what was said before. `report` is told of the load's progress.

        Raises NotHostedError, LoadFailedError, BusyError if there is no room in time or too many wait, and
        EngineDeadError once the host has been stopped.
        """
        unit = self._find(name)
        if self._is_lent(unit):
            assert unit.loaded is not None
            loaded = unit.loaded
            unit.leases += 1
            unit.stop_timer()
        else:
            loaded = await self._wait(unit, report)
        if keep_alive_s is not None:
            unit.keep_alive_s = keep_alive_s
        try:
            yield loaded
        finally:
            self._give_back(unit)

    def is_ready(self, name: str) -> bool:
        """Whether a lease is given at once. Raises NotHostedError, and EngineDeadError."""
        return self._is_lent(self._find(name))

    async def load(self, name: str) -> None:
        """Load it if it is not loaded. Raises what `lease` raises."""
        async with self.lease(name):
            pass

    async def unload(self, name: str, *, wait: bool = False) -> None:
        """Unload it, and return when it is gone. A load is given up: those who waited for it get a BusyError.

        While requests use it, this raises UnitBusyError. With `wait` it waits until they are done; new requests wait,
        too, and load it anew. Raises NotHostedError.
        """
        unit = self._find(name)
        if unit.leases and not wait:
            requests = f"{unit.leases} request" + "s" * (unit.leases > 1)
            raise UnitBusyError(f"the model {quoted(name)} answers {requests}: wait until it is done")
        unit.closing += 1
        try:
            self._end(unit)
            await unit.gone.wait()
        finally:
            unit.closing -= 1
            self._advance(unit)

    def status(self, name: str) -> UnitStatus:
        """A look at one. Raises NotHostedError."""
        return self._find(name).status()

    def snapshot(self) -> list[UnitStatus]:
        """A look at all."""
        return [unit.status() for unit in self._units.values()]

    def events(self) -> AsyncIterator[Event]:
        """All changes of state and progress from now on; see EventReader."""
        reader = EventReader()
        self._readers.add(reader)
        if self._stopped:
            reader.end()
        return reader

    async def stop(self) -> None:
        """Close everything, also what is in use, and wait for it. Those who wait, and all who come, get an error."""
        self._stopped = True
        for unit in self._all():
            unit.fail_waiters(_stopped_error)
            if unit.state is State.LOADING:
                self._give_up_load(unit)
            elif unit.state is State.LOADED:
                self._start_unload(unit)
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._turn_timer is not None:
            self._turn_timer.cancel()
        for reader in self._readers:
            reader.end()

    def _all(self) -> list[Hosted]:
        return [*self._units.values(), *self._removed]

    def _find(self, name: str) -> Hosted:
        if self._stopped:
            raise _stopped_error()
        unit = self._units.get(name)
        if unit is None:
            raise _not_hosted(name)
        return unit

    def _is_lent(self, unit: Hosted) -> bool:
        return unit.state is State.LOADED and not unit.is_dead and not unit.closing and unit not in self._held

    async def _wait(self, unit: Hosted, report: Report | None) -> Loaded:
        if self._num_waiting >= self._max_waiting:
            raise BusyError(f"{self._num_waiting} requests wait for models already; try again later")
        waiter = Waiter(report)
        unit.waiters[waiter] = None
        self._num_waiting += 1
        timer = asyncio.get_running_loop().call_later(self._wait_s, self._end_wait, unit, waiter)
        try:
            self._advance(unit)
            if unit.progress is not None:
                waiter.report(unit.progress)
            return await waiter.turn
        except BaseException:
            if waiter.was_granted:  # and cancelled before it could know
                self._give_back(unit)
            raise
        finally:
            timer.cancel()
            self._num_waiting -= 1
            unit.waiters.pop(waiter, None)
            # What loads already is loaded for who asks again; what waits for room would take it from others for nobody.
            if not unit.waiters and unit.state is State.LOADING and unit.held_bytes is None:
                self._give_up_load(unit)

    def _end_wait(self, unit: Hosted, waiter: Waiter) -> None:
        if unit.state is State.LOADING and unit.held_bytes is not None:
            return  # it has its room
        busy = [other for other in self._all() if other.leases]
        holders = ", ".join(f"{other.name} ({other.leases})" for other in busy[:5]) + ", ..." * (len(busy) > 5)
        needs = "" if unit.needs is None else f", which needs {unit.needs}"
        waiter.fail(
            BusyError(
                f"there was no room within {self._wait_s:g} s for the model {quoted(unit.name)}{needs}: others answer "
                f"requests{f', {holders}' if holders else ''}; try again later"
            )
        )

    def _give_back(self, unit: Hosted) -> None:
        unit.leases -= 1
        unit.last_used = self._clock()
        self._start_timer(unit)
        self._advance(unit)
        self._make_room()

    def _advance(self, unit: Hosted) -> None:
        """Do what can be done now for those who wait for a unit, and unload it if nobody is to have it."""
        if unit.state in (State.UNLOADED, State.FAILED):
            if unit.waiters and not self._stopped:
                self._start_load(unit)
        elif unit.state is State.LOADED:
            if self._is_lent(unit):
                unit.grant()
            expired = unit.expires_at is not None and unit.expires_at <= self._clock()
            if not unit.leases and (unit.is_dead or unit.closing or expired):
                self._start_unload(unit)

    def _start_timer(self, unit: Hosted) -> None:
        if unit.state is State.LOADED and not unit.leases and (keep_s := unit.keep_s) is not None:
            unit.expires_at = self._clock() + keep_s
            self._look_again(unit)

    def _look_again(self, unit: Hosted) -> None:
        """Unload it if it has expired, else wait for that."""
        assert unit.expires_at is not None
        rest_s = unit.expires_at - self._clock()
        if rest_s <= 0:
            self._advance(unit)
        else:
            later = asyncio.get_running_loop().call_later
            unit.timer = later(min(rest_s, _LONGEST_TIMER_S), self._look_again, unit)

    def _end(self, unit: Hosted) -> None:
        """Unload it as soon as that can be."""
        if unit.state is State.LOADING:
            message = f"the model {quoted(unit.name)} was unloaded while it was loading; try again"
            unit.fail_waiters(lambda: BusyError(message))
            self._give_up_load(unit)
        elif unit.state is State.LOADED:
            self._advance(unit)
        elif unit.state is not State.UNLOADING:
            self._gone(unit)

    def _give_up_load(self, unit: Hosted) -> None:
        assert unit.task is not None
        self._line.pop(unit, None)
        self._set(unit, State.UNLOADING)
        unit.task.cancel()

    def _start_load(self, unit: Hosted) -> None:
        unit.error = None
        unit.gone.clear()
        self._start(unit, State.LOADING, self._load(unit), self._end_load)

    def _start_unload(self, unit: Hosted) -> None:
        assert unit.loaded is not None
        unit.stop_timer()
        loaded, unit.loaded = unit.loaded, None
        self._start(unit, State.UNLOADING, self._close(unit, loaded), self._end_unload)

    async def _close(self, unit: Hosted, loaded: Loaded) -> None:
        """Let it write first: units that change places may never stay for so long, and each load would be as slow."""
        ends = self._clock() + _LONGEST_WRITE_S
        # What writes is a thread, which knows of no event.
        while loaded.is_writing and not (self._stopped or unit in self._removed or self._clock() > ends):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        await loaded.close()

    def _start(
        self,
        unit: Hosted,
        state: State,
        work: Coroutine[Any, Any, _Result],
        end: Callable[[Hosted, asyncio.Task[_Result]], None],
    ) -> None:
        """What is done at the `end` is done outside of the task, which may be cancelled before it has begun."""
        task = asyncio.get_running_loop().create_task(work, name=f"{state.value} {unit.name}")
        unit.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(partial(end, unit))
        self._set(unit, state)

    async def _load(self, unit: Hosted) -> Loaded:
        task = asyncio.current_task()

        def report(progress: Progress) -> None:
            if unit.task is task and unit.state is State.LOADING:  # not given up
                self._report(unit, progress)

        report(Progress("waiting"))
        unit.needs = await asyncio.to_thread(unit.unit.plan)
        place = self._line[unit] = asyncio.get_running_loop().create_future()
        self._make_room()
        await place
        report(Progress("reading"))
        begun = self._clock()
        loaded = await unit.unit.load(report)
        unit.turn_ends = self._clock() + max(self._turn_s, self._clock() - begun)
        return loaded

    def _end_load(self, unit: Hosted, task: asyncio.Task[Loaded]) -> None:
        if task.cancelled():
            self._gone(unit)
        elif (error := task.exception()) is not None:
            if not isinstance(error, TidewheelError):
                logger.error("The model %s could not be loaded", unit.name, exc_info=error)
            # Those who wait for a load that was given up wait for the next one.
            self._gone(unit, None if unit.state is State.UNLOADING else error)
        else:
            unit.loaded = task.result()
            if unit.state is State.UNLOADING:  # it was given up too late to be cancelled
                self._start_unload(unit)
                return
            unit.loaded_at = unit.last_used = self._clock()
            self._set(unit, State.LOADED)
            self._start_timer(unit)
            self._advance(unit)
            self._make_room()

    def _end_unload(self, unit: Hosted, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("The model %s was not closed properly", unit.name, exc_info=error)
        self._gone(unit)

    def _gone(self, unit: Hosted, error: BaseException | None = None) -> None:
        """Nothing of the unit is in memory any more, because of `error` if there is one."""
        if unit.held_bytes is not None:
            self._budget.give_back(unit.held_bytes)
        unit.held_bytes = unit.loaded_at = unit.keep_alive_s = unit.task = None
        unit.error = None if error is None else failure_text(error)
        unit.unit.forget()
        self._removed.discard(unit)
        self._set(unit, State.UNLOADED if error is None else State.FAILED)
        unit.gone.set()
        if error is not None:
            unit.fail_waiters(partial(_load_failed, unit.name, error))
        self._advance(unit)
        self._make_room()

    def _make_room(self) -> None:
        """Let those in line have their room, and see to it that the first gets it."""
        held: set[Hosted] = set()
        if self._turn_timer is not None:
            self._turn_timer.cancel()
            self._turn_timer = None
        beside: Room | None = None  # what the first in line leaves to the others
        for unit, place in list(self._line.items()):
            room, needs = self._room(), Room.of(unit)
            if (refused := refusal(unit, self._all(), room, self._budget.total_bytes, self._max_loaded)) is not None:
                del self._line[unit]
                place.set_exception(refused)
            elif room.has(needs) and (beside is None or beside.has(needs)):
                del self._line[unit]
                self._budget.take(needs.num_bytes)
                unit.held_bytes = needs.num_bytes
                place.set_result(None)
                beside = beside and beside.less(needs)
            elif beside is None:
                room = room.without(other for other in self._all() if other.state is State.UNLOADING)
                victims = victims_for(needs, self._all(), room)
                held = self._evict(unit, victims)
                beside = room.without(victims).less(needs)
        let_go, self._held = self._held - held, held
        for unit in let_go:
            self._advance(unit)

    def _evict(self, unit: Hosted, victims: Sequence[Hosted]) -> set[Hosted]:
        """Unload the victims if all are idle. Otherwise, those whose end must be waited for."""
        busy = {victim for victim in victims if not victim.is_idle}
        if not all(victim.state is State.LOADED for victim in busy):
            return set()
        # Whoever asks again at once goes on with its turn: models would change places after each request.
        ends = [
            min(victim.turn_ends, inf if victim in busy else victim.last_used + self._linger_s) for victim in victims
        ]
        rest_s = max(ends, default=0.0) - self._clock()
        if rest_s > 0:
            self._turn_timer = asyncio.get_running_loop().call_later(rest_s, self._make_room)
            return set()
        if not busy:
            self._report(unit, Progress("evicting"))
            for victim in victims:
                self._start_unload(victim)
        return busy

    def _room(self) -> Room:
        held = sum(unit.held_bytes is not None for unit in self._all())
        return Room(self._budget.free_bytes, self._max_loaded - held)

    def _report(self, unit: Hosted, progress: Progress) -> None:
        if unit.advance_progress(progress):
            assert unit.progress is not None
            self._emit(unit)
            for waiter in list(unit.waiters):
                waiter.report(unit.progress)

    def _set(self, unit: Hosted, state: State) -> None:
        if unit.state is not state:
            unit.state = state
            unit.progress = None
            self._emit(unit)

    def _emit(self, unit: Hosted) -> None:
        event = Event(unit.name, unit.state, unit.progress, unit.error_text)
        for reader in self._readers:
            reader.put(event)


def _not_hosted(name: str) -> NotHostedError:
    return NotHostedError(f"there is no model {quoted(name)}")


def _stopped_error() -> EngineDeadError:
    return EngineDeadError("the server is shutting down")


def _load_failed(name: str, error: BaseException) -> LoadFailedError:
    failed = LoadFailedError(f"the model {quoted(name)} cannot be loaded: {failure_text(error)}")
    failed.__cause__ = error
    return failed
