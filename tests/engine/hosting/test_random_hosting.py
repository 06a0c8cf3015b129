"""Loads, requests, cancellations, evictions and faults at random: the books balance, and no request is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import NamedTuple

import pytest
from engine.hosting.scripted_units import Machine, ScriptedLoaded, ScriptedUnit
from engine.hosting.virtual_time import run
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.errors import BusyError, ModelError
from tidewheel.engine.hosting.budget import MemoryBudget
from tidewheel.engine.hosting.host import ModelHost
from tidewheel.engine.hosting.units import Event, LoadFailedError, NotHostedError, State, UnitBusyError

TOTAL = 10
CHANGES = {
    State.UNLOADED: {State.LOADING},
    State.LOADING: {State.LOADED, State.UNLOADING, State.FAILED},
    State.LOADED: {State.UNLOADING},
    State.UNLOADING: {State.UNLOADED},
    State.FAILED: {State.LOADING, State.UNLOADED},
}


class Request(NamedTuple):
    unit: int
    runs_s: float
    keep_alive_s: float | None
    patience_s: float | None  # then its client hangs up


class Unload(NamedTuple):
    unit: int
    wait: bool


class Replace(NamedTuple):
    unit: int
    size: int


class Die(NamedTuple):
    unit: int


class Scene(NamedTuple):
    """What happens, each after a pause; with how many loaded units at most, and how long requests wait."""

    units: list[dict[str, object]]
    max_loaded: int | None
    wait_s: float
    linger_s: float
    moves: list[tuple[float, Request | Unload | Replace | Die]]


FAULTS = st.lists(
    st.sampled_from([None, None, partial(ModelError, "broken"), partial(ValueError, "surprise")]), max_size=3
)
UNITS = st.fixed_dictionaries(
    {
        "size": st.integers(1, TOTAL + 1),
        "pinned": st.sampled_from([False, False, False, True]),
        "idle_s": st.sampled_from([None, None, 0.0, 3.0, 30.0]),
        "load_s": st.sampled_from([0.0, 1.0, 8.0]),
        "close_s": st.sampled_from([0.0, 0.5]),
        "faults": FAULTS,
        "plan_faults": FAULTS,
        "stubborn": st.booleans(),
        "close_fails": st.booleans(),
    }
)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    units = draw(st.lists(UNITS, min_size=2, max_size=5))
    which = st.integers(0, len(units) - 1)
    request = st.builds(
        Request,
        which,
        st.sampled_from([0.0, 0.3, 4.0, 20.0]),
        st.sampled_from([None, None, 0.0, 2.0, -1.0]),
        st.sampled_from([None, None, None, 0.0, 0.5, 5.0]),
    )
    others = st.one_of(
        st.builds(Unload, which, st.booleans()), st.builds(Replace, which, st.integers(1, TOTAL)), st.builds(Die, which)
    )
    move = st.one_of(request, request, request, others)
    moves = st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.2, 3.0]), move), min_size=1, max_size=40)
    return Scene(
        units,
        draw(st.sampled_from([None, 1, 2])),
        draw(st.sampled_from([6.0, 1e5])),
        draw(st.sampled_from([0.0, 1.0])),
        draw(moves),
    )


class Play:
    """A scene in virtual time, and what is checked meanwhile."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.machine = Machine(TOTAL)
        self.budget = MemoryBudget(TOTAL)
        self.units = [ScriptedUnit(f"u{i}", self.machine, **options) for i, options in enumerate(scene.units)]  # type: ignore[arg-type]
        self.unloaded: set[str] = set()  # by somebody's hand
        self.replaced: set[str] = set()
        self.pins = [unit for unit in self.units if unit.pinned]

    async def run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.host = ModelHost(
            self.units,
            self.budget,
            max_loaded=self.scene.max_loaded,
            wait_s=self.scene.wait_s,
            linger_s=self.scene.linger_s,
            clock=self.loop.time,
        )
        told: list[Event] = []
        listener = asyncio.create_task(self._listen(told))
        moves: list[Awaitable[None]] = []
        for pause_s, move in self.scene.moves:
            await asyncio.sleep(pause_s)
            moves.append(asyncio.create_task(self._make(move)))
            self.check_books()
        await asyncio.gather(*moves)
        await asyncio.sleep(100)  # what was asked for by those who hung up is loaded, what idles is gone
        self.check_books()
        for status in self.host.snapshot():
            assert (status.leases, status.waiting) == (0, 0)
            assert status.state in (State.UNLOADED, State.LOADED, State.FAILED)
        for unit in self.units:
            unit.may_go = True
        await self.host.stop()
        await listener
        assert (self.machine.used, self.budget.used_bytes, self.machine.wrong) == (0, 0, [])
        assert self.machine.most_loaded <= (self.scene.max_loaded or len(self.units))
        self.check_events(told)

    def check_books(self) -> None:
        assert self.machine.used <= self.budget.used_bytes <= TOTAL
        held = sum(status.needs.total_bytes for status in self.host.snapshot() if status.needs and status.loaded_at)
        assert held <= self.budget.used_bytes

    def check_events(self, told: list[Event]) -> None:
        for unit in self.units:
            if unit.name not in self.replaced:  # else there are events of two
                changes = [event.state for event in told if event.name == unit.name and event.progress is None]
                for before, after in zip([State.UNLOADED, *changes], changes, strict=False):
                    assert after in CHANGES[before], (unit.name, before, after)

    async def _listen(self, told: list[Event]) -> None:
        told.extend([event async for event in self.host.events()])

    async def _make(self, move: Request | Unload | Replace | Die) -> None:
        unit = self.units[move.unit]
        if isinstance(move, Request):
            await self._request(unit, move)
        elif isinstance(move, Unload):
            self.unloaded.add(unit.name)
            unit.may_go = unit.pinned
            try:
                await self.host.unload(unit.name, wait=move.wait)
            except UnitBusyError:
                assert not move.wait
            except NotHostedError:
                assert unit.name in self.replaced
        elif isinstance(move, Replace):
            self.replaced.add(unit.name)
            unit.may_go = unit.pinned
            self.units[move.unit] = new = ScriptedUnit(unit.name, self.machine, size=move.size)
            gone = asyncio.create_task(self.host.remove(unit.name))
            await asyncio.sleep(0)
            self.host.add(new)
            await gone
        elif unit.loaded is not None:
            unit.loaded.failure = RuntimeError("killed")

    async def _request(self, unit: ScriptedUnit, request: Request) -> None:
        asked = self.loop.time()
        try:
            await asyncio.wait_for(self._use(unit, request, asked), request.patience_s)
        except asyncio.TimeoutError:
            assert request.patience_s is not None
        except LoadFailedError as failed:
            self._check_failure(unit, str(failed))
        except NotHostedError:
            assert unit.name in self.replaced
        except BusyError as busy:
            if "was unloaded while it was loading" in str(busy):
                assert unit.name in self.unloaded
            else:
                assert self.loop.time() == asked + self.scene.wait_s == asked + 6.0

    def _check_failure(self, unit: ScriptedUnit, said: str) -> None:
        if "needs" in said:
            assert unit.size > TOTAL or self.pins
        elif "pinned" in said:
            assert self.scene.max_loaded is not None
            assert self.pins
        else:
            assert "broken" in said or "ValueError" in said

    async def _use(self, unit: ScriptedUnit, request: Request, asked: float) -> None:
        async with self.host.lease(unit.name, keep_alive_s=request.keep_alive_s) as loaded:
            assert self.loop.time() - asked < 1000  # nobody waits for ever
            assert isinstance(loaded, ScriptedLoaded)
            assert loaded.unit.name == unit.name
            with loaded.use():
                await asyncio.sleep(request.runs_s)
            assert not loaded.closed


@settings(max_examples=30)
@given(scenes())
def test_the_books_balance_and_no_request_is_lost(scene: Scene) -> None:
    run(Play(scene).run())


@pytest.mark.sweep
@settings(max_examples=2000)
@given(scenes())
def test_it_holds_in_many_more_scenes(scene: Scene) -> None:
    run(Play(scene).run())
