"""When Python's garbage collector runs beside streams."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import wait_until

from tidewheel.engine.adapters.threads import in_thread
from tidewheel.server import garbage
from tidewheel.server.ids import new_id


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize("all_are_due", [False, True])
def test_what_lives_on_is_collected_in_a_while(all_are_due: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_PAUSE_S", 0.01)
    monkeypatch.setattr(garbage, "_PAUSE_RATIO", 0)
    monkeypatch.setattr(garbage, "_due", 0.0 if all_are_due else float("inf"))
    monkeypatch.setattr(garbage, "_num_running", 0)  # in this process, by other tests
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    thresholds = (700, 10, 10)
    gc.set_threshold(*thresholds)

    async def run() -> None:
        collecting = asyncio.create_task(garbage.collect_seldom())
        await asyncio.sleep(0)
        assert gc.get_threshold() != thresholds
        with garbage.large_value():
            assert not gc.isenabled()
            found = weakref.ref(Cycle())
        assert gc.isenabled()
        await asyncio.get_running_loop().run_in_executor(None, wait_until, lambda: found() is None)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)

    asyncio.run(run())
    assert gc.get_threshold() == thresholds
    gc.set_threshold(*before)
    assert gc.get_freeze_count() >= frozen // 2  # what a start has frozen stays so, except what was freed


def test_what_fails_in_a_thread_needs_no_collection() -> None:
    found: list[weakref.ref[Cycle]] = []

    def work() -> None:
        made = Cycle()
        del made.own
        found.append(weakref.ref(made))
        raise ValueError("no adapter")

    async def run() -> None:
        with contextlib.suppress(ValueError):
            await in_thread("test", work)

    gc.disable()
    try:
        asyncio.run(run())
        wait_until(lambda: found[0]() is None, timeout_s=10)
    finally:
        gc.enable()


def test_ids_are_all_different() -> None:
    with ThreadPoolExecutor(4) as pool:
        ids = [one for some in pool.map(lambda _: [new_id() for _ in range(1000)], range(8)) for one in some]
    assert len({*ids}) == 8000
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)
