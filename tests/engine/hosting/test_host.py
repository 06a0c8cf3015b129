"""What a ModelHost promises, one promise after the other, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
from engine.hosting.scripted_units import Machine, ScriptedLoaded, ScriptedUnit, units
from engine.hosting.virtual_time import run

from tidewheel.engine.errors import BusyError, EngineDeadError, ModelError
from tidewheel.engine.hosting.budget import MemoryBudget
from tidewheel.engine.hosting.events import EventReader
from tidewheel.engine.hosting.host import ModelHost
from tidewheel.engine.hosting.units import (
    Event,
    LoadFailedError,
    NotHostedError,
    Progress,
    State,
    UnitBusyError,
)

TOTAL = 10


class Stage:
    """A host with units of a machine of 10 bytes; a unit takes 4, unless it says so."""

    def __init__(self, *names: str, **options: object) -> None:
        self.machine = Machine(TOTAL)
        self.units = {unit.name: unit for unit in units(self.machine, names)}
        self._options = options

    def start(self) -> ModelHost:
        loop = asyncio.get_running_loop()
        self.budget = MemoryBudget(TOTAL)
        options: dict[str, Any] = {"linger_s": 0.0, **self._options}
        self.host = ModelHost(self.units.values(), self.budget, clock=loop.time, **options)
        return self.host

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def states(self) -> dict[str, str]:
        return {status.name: status.state.value for status in self.host.snapshot()}

    async def use(self, name: str, seconds: float = 0.0, **options: object) -> float:
        """A request; when it began to run."""
        async with self.host.lease(name, **options) as loaded:  # type: ignore[arg-type]
            assert isinstance(loaded, ScriptedLoaded)
            assert loaded.unit.name == name
            begun = self.now
            with loaded.use():
                await asyncio.sleep(seconds)
            return begun


def play(stage: Stage, scene: Callable[[ModelHost], Awaitable[None]]) -> None:
    """Then the host stops, and the machine is empty."""

    async def main() -> None:
        host = stage.start()
        await scene(host)
        for unit in stage.units.values():
            unit.may_go = True
        await host.stop()

    run(main())
    assert (stage.machine.used, stage.budget.used_bytes, stage.machine.wrong) == (0, 0, [])


def test_the_first_request_loads_and_all_who_wait_share_the_load() -> None:
    stage = Stage("a")

    async def scene(host: ModelHost) -> None:
        assert stage.states() == {"a": "unloaded"}
        begun = await asyncio.gather(*(stage.use("a", 1.0) for _ in range(3)))
        assert begun == [2.0, 2.0, 2.0]
        assert await stage.use("a") == stage.now  # at once
        assert stage.units["a"].num_loads == 1
        assert stage.states() == {"a": "loaded"}

    play(stage, scene)


def test_the_least_recently_used_makes_room_and_no_more_than_needed() -> None:
    stage = Stage("a", "b", "c")
    stage.units["a"].size, stage.units["b"].size, stage.units["c"].size = 2, 7, 7

    async def scene(host: ModelHost) -> None:
        await stage.use("a")
        await stage.use("b")
        await stage.use("c")  # b alone is enough, although a was not used for longer
        assert stage.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        stage.units["d"] = ScriptedUnit("d", stage.machine, size=1)
        host.add(stage.units["d"])
        await stage.use("d")
        assert stage.states() == {"a": "loaded", "b": "unloaded", "c": "loaded", "d": "loaded"}
        stage.units["e"] = ScriptedUnit("e", stage.machine, size=2)
        host.add(stage.units["e"])
        await stage.use("e")
        assert stage.states()["a"] == "unloaded"

    play(stage, scene)


def test_a_busy_unit_is_waited_for() -> None:
    stage = Stage("a", "b")
    stage.units["b"].size = 8

    async def scene(host: ModelHost) -> None:
        long = asyncio.create_task(stage.use("a", 30.0))
        await asyncio.sleep(3)
        assert await stage.use("b") == 32.0 + 0.5 + 2.0
        await long

    play(stage, scene)


def test_steady_requests_for_a_loaded_unit_do_not_keep_others_out() -> None:
    stage = Stage("a", "b", turn_s=10.0)
    stage.units["b"].size = 8

    async def scene(host: ModelHost) -> None:
        async def steady() -> list[float]:
            return [await stage.use("a", 3.0) for _ in range(8)]

        streams = [asyncio.create_task(steady()) for _ in range(3)]
        await asyncio.sleep(1.0)
        for delay, stream in enumerate(streams):
            assert not stream.done()
            await asyncio.sleep(0.7 * (delay > 0))
        begun = await stage.use("b", 1.0)
        assert 12.0 < begun < 12.0 + 3.0 + 2.5 + 1e-9  # a's turn, what ran at its end, and b's load
        await asyncio.gather(*streams)  # and a comes back
        assert stage.units["a"].num_loads == 2

    play(stage, scene)


def test_models_do_not_change_places_after_each_request() -> None:
    stage = Stage("a", "b", turn_s=10.0, linger_s=0.1)
    stage.units["b"].size = 8

    async def scene(host: ModelHost) -> None:
        async def client(name: str) -> None:  # one request after the other
            for _ in range(20):
                await stage.use(name, 0.4)
                await asyncio.sleep(0.02)

        await asyncio.gather(client("a"), client("b"))
        assert (stage.units["a"].num_loads, stage.units["b"].num_loads) == (1, 1)
        await stage.use("a")  # after the rest of b's turn, which nobody uses
        assert stage.now < 20 * 0.42 * 2 + 2 * 2.0 + 2 * 0.5 + 2.0 + 0.3

    play(stage, scene)


def test_a_turn_is_at_least_as_long_as_the_load_was() -> None:
    stage = Stage("a", "b", turn_s=10.0)
    stage.units["b"].size, stage.units["a"].load_s = 8, 60.0

    async def scene(host: ModelHost) -> None:
        async def steady() -> None:
            for _ in range(40):
                await stage.use("a", 3.0)

        streams = [asyncio.create_task(steady())]
        await asyncio.sleep(61.5)
        streams.append(asyncio.create_task(steady()))
        assert 120.0 < await stage.use("b") < 126.0
        await asyncio.gather(*streams)

    play(stage, scene)


def test_who_waits_too_long_for_busy_ones_is_told_the_numbers() -> None:
    stage = Stage("a", "b", wait_s=20.0)
    stage.units["b"].size = 8

    async def scene(host: ModelHost) -> None:
        long = asyncio.create_task(stage.use("a", 60.0))
        await asyncio.sleep(3)
        with pytest.raises(BusyError, match=r"no room within 20 s for the model 'b', which needs .* requests, a \(1\)"):
            await stage.use("b")
        assert stage.now == 23.0
        assert await stage.use("a") == 23.0  # it is no longer held back
        await asyncio.sleep(1)
        assert stage.states() == {"a": "loaded", "b": "unloaded"}
        await long

    play(stage, scene)


def test_a_long_load_is_waited_for_however_long_it_takes() -> None:
    stage = Stage("a", wait_s=20.0)
    stage.units["a"].load_s = 600.0

    async def scene(host: ModelHost) -> None:
        assert await stage.use("a") == 600.0

    play(stage, scene)


def test_too_many_who_wait_are_refused_at_once() -> None:
    stage = Stage("a", max_waiting=2)

    async def scene(host: ModelHost) -> None:
        waiting = [asyncio.create_task(stage.use("a")) for _ in range(2)]
        await asyncio.sleep(1)
        with pytest.raises(BusyError, match="2 requests wait for models already"):
            await stage.use("a")
        await asyncio.gather(*waiting)
        await stage.use("a")

    play(stage, scene)


def test_what_can_never_fit_is_refused_at_once_with_the_numbers() -> None:
    stage = Stage("a", "b", "c")
    stage.machine.total = 2**40
    stage.units["a"].pinned, stage.units["a"].size = True, 4 * 2**30
    stage.units["b"].size, stage.units["c"].size = 11 * 2**30, 7 * 2**30

    async def scene(host: ModelHost) -> None:
        stage.budget.total_bytes = 10 * 2**30
        with pytest.raises(LoadFailedError, match=r"'b' cannot be loaded: it needs 11\.00 GiB \(.*10\.00 GiB that all"):
            await stage.use("b")
        await stage.use("c")
        await stage.use("a")
        with pytest.raises(LoadFailedError, match=r"of which pinned ones \(a\) leave 6\.00 GiB: raise --memory"):
            await stage.use("c")
        assert stage.now == 2.0 + 0.5 + 2.0
        assert stage.states() == {"a": "loaded", "b": "failed", "c": "failed"}
        stage.units["a"].may_go = True
        await host.unload("a")  # by hand
        await stage.use("c")

    play(stage, scene)


def test_small_ones_pass_a_large_one_that_waits_if_that_takes_nothing_from_it() -> None:
    stage = Stage("busy", "large", "small", "medium")
    sizes = {"busy": 5, "large": 8, "small": 2, "medium": 4}
    for name, size in sizes.items():
        stage.units[name].size = size

    async def scene(host: ModelHost) -> None:
        long = asyncio.create_task(stage.use("busy", 40.0))
        await asyncio.sleep(3)
        large = asyncio.create_task(stage.use("large"))
        await asyncio.sleep(1)
        medium = asyncio.create_task(stage.use("medium"))  # fits into the free five bytes, but not beside the large one
        await asyncio.sleep(1)
        assert await stage.use("small") == 7.0  # fits beside it, too
        assert await large == 42.0 + 0.5 + 2.0
        assert await medium > 44.5
        await long

    play(stage, scene)


def test_a_failed_load_is_the_same_error_for_all_and_the_next_request_tries_again() -> None:
    stage = Stage("a", "b")
    stage.units["a"].faults = [partial(ModelError, "the file is broken")]
    stage.units["b"].plan_faults = [partial(OSError, "disk")]

    async def scene(host: ModelHost) -> None:
        results = await asyncio.gather(*(stage.use("a") for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in results] == ["the model 'a' cannot be loaded: the file is broken"] * 3
        assert {type(error) for error in results} == {LoadFailedError}
        assert len({id(error) for error in results}) == 3
        (status, _) = host.snapshot()
        assert (status.state, status.error) == (State.FAILED, "the file is broken")
        assert stage.budget.used_bytes == 0
        await stage.use("a")
        assert host.status("a").error is None
        assert stage.units["a"].num_loads == 2
        with pytest.raises(LoadFailedError, match="an unexpected OSError; the log says more"):
            await stage.use("b")

    play(stage, scene)


def test_an_engine_that_died_is_loaded_anew() -> None:
    stage = Stage("a")

    async def scene(host: ModelHost) -> None:
        long = asyncio.create_task(stage.use("a", 10.0))
        await asyncio.sleep(3)
        assert stage.units["a"].loaded is not None
        stage.units["a"].loaded.failure = RuntimeError("a segment is gone")
        assert host.status("a").state is State.FAILED
        assert await stage.use("a") == 12.0 + 0.5 + 2.0  # those who had it are done first
        await long
        assert stage.units["a"].num_loads == 2

    play(stage, scene)


def test_idle_units_are_unloaded_by_their_time_or_by_the_requests() -> None:
    stage = Stage("a", "b", "c")
    stage.units["a"].idle_s, stage.units["b"].idle_s = 100.0, 100.0
    stage.units["b"].pinned, stage.units["b"].size, stage.units["c"].size = True, 2, 2

    async def scene(host: ModelHost) -> None:
        await asyncio.gather(*map(stage.use, "abc"))
        assert [status.expires_at for status in host.snapshot()] == [102.0, None, None]
        await asyncio.sleep(99)
        await stage.use("a", 5.0)
        assert host.status("a").expires_at == 206.0
        await asyncio.sleep(99)
        assert stage.states()["a"] == "loaded"
        await asyncio.sleep(2)
        assert stage.states() == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        await stage.use("a", keep_alive_s=-1)
        await stage.use("c", keep_alive_s=30)
        await stage.use("c")  # says nothing, so what was said holds
        await asyncio.sleep(31)
        assert stage.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        await asyncio.sleep(1000)
        assert stage.states()["a"] == "loaded"
        await asyncio.gather(stage.use("a", 5.0, keep_alive_s=0), stage.use("b", keep_alive_s=0), stage.use("a", 1.0))
        await asyncio.sleep(1)
        assert stage.states() == {"a": "unloaded", "b": "loaded", "c": "unloaded"}

    play(stage, scene)


def test_unloading_by_hand_is_refused_while_it_is_busy_or_waits() -> None:
    stage = Stage("a")

    async def scene(host: ModelHost) -> None:
        long = asyncio.create_task(stage.use("a", 10.0))
        await asyncio.sleep(3)
        with pytest.raises(UnitBusyError, match="'a' answers 1 request: "):
            await host.unload("a")
        unloaded = asyncio.create_task(host.unload("a", wait=True))
        await asyncio.sleep(1)
        late = asyncio.create_task(stage.use("a"))
        await unloaded
        assert stage.now == 12.5
        assert await late == 14.5  # loaded anew
        await long

    play(stage, scene)


def test_waiting_to_unload_can_be_given_up() -> None:
    stage = Stage("a")

    async def scene(host: ModelHost) -> None:
        long = asyncio.create_task(stage.use("a", 10.0))
        await asyncio.sleep(3)
        late = asyncio.create_task(stage.use("a"))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(host.unload("a", wait=True), 2.0)
        assert await stage.use("a") == 5.0
        await asyncio.gather(long, late)

    play(stage, scene)


@pytest.mark.parametrize("stubborn", [False, True], ids=["cancelled", "too late to be cancelled"])
def test_unloading_ends_a_load(stubborn: bool) -> None:
    stage = Stage("a")
    stage.units["a"].stubborn = stubborn

    async def scene(host: ModelHost) -> None:
        waiting = asyncio.create_task(stage.use("a"))
        await asyncio.sleep(1)
        await host.unload("a")
        with pytest.raises(BusyError, match="was unloaded while it was loading"):
            await waiting
        assert stage.states() == {"a": "unloaded"}
        assert stage.machine.used == 0
        await stage.use("a")

    play(stage, scene)


def test_who_comes_when_a_load_is_given_up_gets_the_next_one() -> None:
    stage = Stage("a")
    stage.units["a"].stubborn, stage.units["a"].faults = True, [partial(ModelError, "the thread was told to end")]

    async def scene(host: ModelHost) -> None:
        waiting = asyncio.create_task(stage.use("a"))
        await asyncio.sleep(1)
        unloaded = asyncio.create_task(host.unload("a"))
        await asyncio.sleep(0)
        late, progress = asyncio.create_task(stage.use("a")), list[Progress]()
        await unloaded
        stage.units["a"].reports[0](Progress("reading", 0.9))  # of the load that was given up
        await stage.use("a", report=progress.append)
        await late
        assert Progress("reading", 0.9) not in progress
        assert stage.units["a"].num_loads == 2
        with pytest.raises(BusyError):
            await waiting

    play(stage, scene)


def test_nobody_is_evicted_for_requests_that_were_given_up() -> None:
    stage = Stage("a", "b")
    stage.units["b"].size = 8

    async def scene(host: ModelHost) -> None:
        long = asyncio.create_task(stage.use("a", 10.0))
        await asyncio.sleep(3)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stage.use("b"), 1.0)
        await long
        await asyncio.sleep(20)
        assert stage.states() == {"a": "loaded", "b": "unloaded"}

    play(stage, scene)


def test_a_load_that_has_begun_goes_on_for_the_next_who_asks() -> None:
    stage = Stage("a")

    async def scene(host: ModelHost) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stage.use("a"), 1.0)
        assert await stage.use("a") == 2.0
        assert stage.units["a"].num_loads == 1
        await host.unload("a")
        stage.units["a"].idle_s = 3.0
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stage.use("a"), 1.0)
        await asyncio.sleep(1.5)
        assert stage.states() == {"a": "loaded"}
        await asyncio.sleep(4)
        assert stage.states() == {"a": "unloaded"}  # nobody asked again

    play(stage, scene)


def test_who_is_cancelled_just_when_it_gets_its_lease_has_none() -> None:
    stage = Stage("a")

    async def scene(host: ModelHost) -> None:
        async def first() -> None:
            async with host.lease("a"):
                second.cancel()  # which has got its lease, too, but has not run since

        second: asyncio.Task[float]
        both = asyncio.create_task(first()), (second := asyncio.create_task(stage.use("a")))
        await asyncio.wait(both)
        assert second.cancelled()
        assert host.status("a").leases == 0
        await host.unload("a")

    play(stage, scene)


def test_at_most_so_many_are_loaded() -> None:
    stage = Stage("a", "b", "c", max_loaded=1)
    for unit in stage.units.values():
        unit.size = 1

    async def scene(host: ModelHost) -> None:
        await asyncio.gather(*(stage.use(name) for name in "abcabc"))
        assert stage.machine.most_loaded == 1
        await host.unload("c")
        stage.units["a"].pinned = True
        await stage.use("a")
        with pytest.raises(LoadFailedError, match=r"no more than 1 models are loaded .*pinned: a; unpin one"):
            await stage.use("b")

    play(stage, scene)


def test_units_come_and_go() -> None:
    stage = Stage("a")

    async def scene(host: ModelHost) -> None:
        with pytest.raises(ModelError, match="two models are named 'a'"):
            host.add(stage.units["a"])
        long = asyncio.create_task(stage.use("a", 10.0))
        await asyncio.sleep(3)
        removed = asyncio.create_task(host.remove("a"))
        await asyncio.sleep(1)
        with pytest.raises(NotHostedError, match="there is no model 'a'"):
            await stage.use("a")
        stage.units["a"] = ScriptedUnit("a", stage.machine)  # its file was replaced
        host.add(stage.units["a"])
        assert await stage.use("a") == 6.0
        assert not removed.done()
        await long
        await removed
        assert stage.machine.num_loaded == 1
        waiting = asyncio.create_task(stage.use("a"))
        await host.unload("a")
        await asyncio.sleep(0)
        await host.remove("a")
        with pytest.raises(NotHostedError):
            await waiting
        assert host.snapshot() == []

    play(stage, scene)


def test_stopping_ends_everything_and_everybody() -> None:
    stage = Stage("a", "b", "c")

    async def scene(host: ModelHost) -> None:
        async with AsyncExitStack() as leases:
            loaded = await leases.enter_async_context(host.lease("a"))
            assert isinstance(loaded, ScriptedLoaded)
            loaded.users, loaded.unit.may_go = 1, True
            waiting = [asyncio.create_task(stage.use(name)) for name in "bc"]
            events = host.events()
            await asyncio.sleep(1)
            await host.stop()
            for task in waiting:
                with pytest.raises(EngineDeadError, match="shutting down"):
                    await task
            assert [event async for event in events][-1].state is State.UNLOADED
        with pytest.raises(EngineDeadError, match="shutting down"):
            await stage.use("a")

    play(stage, scene)


def test_progress_only_grows_and_everybody_hears_of_it() -> None:
    stage = Stage("a", "b", "c")
    stage.units["b"].size = 8

    async def scene(host: ModelHost) -> None:
        await stage.use("a")
        events, heard = host.events(), list[Progress]()
        await stage.use("b", report=heard.append)
        parts = [Progress("reading", part / 4) for part in range(4)]
        course = [Progress("waiting"), Progress("evicting"), *parts, Progress("warming up", 1.0)]
        assert heard == course
        told = [await anext(events) for _ in range(4)]
        assert told == [
            Event("b", State.LOADING),
            Event("a", State.UNLOADING),
            Event("a", State.UNLOADED),
            Event("b", State.LOADED),
        ]  # nobody read the progress in time

        def broken(progress: Progress) -> None:
            raise RuntimeError("this client has left")

        good, bad = await asyncio.gather(stage.use("c"), stage.use("c", report=broken), return_exceptions=True)
        assert isinstance(good, float)
        assert isinstance(bad, RuntimeError)

    play(stage, scene)


def test_who_reads_events_as_they_come_gets_all_of_them() -> None:
    stage = Stage("a")

    async def scene(host: ModelHost) -> None:
        events, told = host.events(), list[Event]()

        async def read() -> None:
            async for event in events:
                told.append(event)

        reader = asyncio.create_task(read())
        await stage.use("a")
        await host.stop()
        await reader
        progress = [event.progress for event in told if event.progress is not None]
        assert progress == sorted(progress, key=lambda one: one.fraction)
        assert {one.stage for one in progress} == {"waiting", "reading", "warming up"}
        changes = [event.state.value for event in told if event.progress is None]
        assert changes == ["loading", "loaded", "unloading", "unloaded"]

    play(stage, scene)


def test_a_reader_who_never_reads_takes_little_memory() -> None:
    async def main() -> None:
        reader = EventReader()
        for state in [State.LOADING, State.FAILED] * 600:
            reader.put(Event("a", state))
            reader.put(Event("a", state, Progress("waiting")))
        assert len([event async for event in reader]) == 1000  # and it ends

    run(main())


def test_a_budget_lends_no_more_than_there_is() -> None:
    budget = MemoryBudget(10)
    budget.take(6)
    with pytest.raises(MemoryError, match="5 bytes wanted, 4 of 10 free"):
        budget.take(5)
    budget.give_back(2)
    budget.take(6)
    with pytest.raises(ValueError, match="11 bytes given back, 10 taken"):
        budget.give_back(11)
    assert (budget.used_bytes, budget.free_bytes) == (10, 0)
    MemoryBudget(None).take(2**60)  # nobody knows how much there is


def test_the_budget_is_a_share_of_what_is_available() -> None:
    half, whole = MemoryBudget.of_available(0.5).total_bytes, MemoryBudget.of_available(1.0).total_bytes
    assert half is not None
    assert whole is not None
    assert 0.3 < half / whole < 0.7


def test_a_unit_that_writes_for_its_next_load_is_closed_when_it_has_written() -> None:
    stage = Stage("a", "b", "c", max_loaded=1)

    async def scene(host: ModelHost) -> None:
        await stage.use("a")
        loaded = stage.units["a"].loaded
        assert loaded is not None
        loaded.is_writing = True
        asyncio.get_running_loop().call_later(7.0, setattr, loaded, "is_writing", False)
        begun = stage.now
        assert await stage.use("b") == pytest.approx(begun + 7.0 + 0.5 + 2.0, abs=0.1)
        loaded = stage.units["b"].loaded
        assert loaded is not None
        loaded.is_writing = True  # to a disk that does not answer
        begun = stage.now
        assert await stage.use("c") == pytest.approx(begun + 60.0 + 0.5 + 2.0, abs=0.1)
        loaded = stage.units["c"].loaded
        assert loaded is not None
        loaded.is_writing = True
        begun = stage.now
        await host.remove("c")
        assert stage.now == pytest.approx(begun + 0.5)

    play(stage, scene)


def test_a_stop_waits_for_no_writing() -> None:
    stage = Stage("a", "b")

    async def scene(host: ModelHost) -> None:
        for name in ("a", "b"):
            await stage.use(name)
            loaded = stage.units[name].loaded
            assert loaded is not None
            loaded.is_writing = True
        unloading = asyncio.create_task(host.unload("a"))
        await asyncio.sleep(1.0)
        assert stage.states() == {"a": "unloading", "b": "loaded"}
        begun = stage.now
        await host.stop()
        assert stage.now == pytest.approx(begun + 0.5, abs=0.1)
        await unloading

    play(stage, scene)
