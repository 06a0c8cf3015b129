"""The registry: it limits the adapters in memory, takes none away from those who use it, and leaves nobody waiting."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidewheel.engine.adapters.hub import AdapterHub
from tidewheel.engine.adapters.options import LoraModule, LoraOptions
from tidewheel.engine.adapters.registry import LoraExistsError, LoraRegistry, UnknownLoraError
from tidewheel.engine.errors import ModelError
from tidewheel.engine.weights.lora import LoraAdapter, LowRankUpdate

_MODULES = tuple(LoraModule(name, name) for name in "abc")


def _read(path: Path) -> LoraAdapter:
    if path.name.startswith("slow"):
        time.sleep(0.1)
    if path.name.endswith("broken"):
        raise ModelError("broken")
    size = 1 + ord(path.name[0])
    return LoraAdapter((LowRankUpdate("layers.0.q", np.ones((1, size), np.float32), np.ones((1, 1), np.float32), 1.0),))


class Memory:
    """Stands in for an executor: which numbers it has, and the most at a time."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.most = 0

    def load_lora(self, number: int, adapter: LoraAdapter) -> None:
        self.numbers.add(number)
        self.most = max(self.most, len(self.numbers))

    def drop_lora(self, number: int) -> None:
        self.numbers.remove(number)


def run(check: Callable[[LoraRegistry, Memory], Any], max_cpu_loras: int = 2) -> None:
    async def main() -> None:
        memory: Any = Memory()
        options = LoraOptions(enable_lora=True, lora_modules=_MODULES, max_cpu_loras=max_cpu_loras)
        registry = LoraRegistry(options, _read, memory, AdapterHub(None))
        registry.load_modules()
        try:
            await asyncio.wait_for(check(registry, memory), 30)
        finally:
            registry.close()
        assert memory.most <= max_cpu_loras

    asyncio.run(main())


def test_who_runs_and_who_waits_is_known() -> None:
    async def check(registry: LoraRegistry, memory: Memory) -> None:
        b, c = await registry.lease("b"), await registry.lease("c")
        assert (b.name, c.name) == ("b", "c")
        waiting = asyncio.create_task(registry.lease("a"))  # for room in memory
        await asyncio.sleep(0)
        assert registry.used({b.lora.number}, {c.lora.number}) == (["b"], ["a", "c"])
        b.release()
        a = await waiting
        assert registry.used({a.lora.number, c.lora.number}, set()) == (["a", "c"], [])

    run(check)


def test_the_least_recently_used_makes_way() -> None:
    async def check(registry: LoraRegistry, memory: Memory) -> None:
        numbers = {}
        for name in "abcaab":
            lease = await registry.lease(name)
            assert lease.lora.number in memory.numbers
            numbers[name] = lease.lora.number
            lease.release()
            lease.release()  # the second time does nothing
        again = await registry.lease("a")
        assert again.lora.number == numbers["a"]

    run(check)


def test_one_in_use_stays_and_who_needs_its_room_waits() -> None:
    async def check(registry: LoraRegistry, memory: Memory) -> None:
        held = await registry.lease("a")
        waiting = [asyncio.create_task(registry.lease("b")) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        assert held.lora.number in memory.numbers
        late = asyncio.create_task(registry.lease("a"))  # has to wait, or "b" would never come
        await asyncio.sleep(0.05)
        assert not late.done()
        held.release()
        for lease in await asyncio.gather(*waiting):
            lease.release()
        (await late).release()

    run(check, max_cpu_loras=1)


def test_who_stops_waiting_leaves_all_as_it_was() -> None:
    async def check(registry: LoraRegistry, memory: Memory) -> None:
        held = await registry.lease("a")
        waiting = asyncio.create_task(registry.lease("b"))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        (await registry.lease("a")).release()
        held.release()

    run(check, max_cpu_loras=1)


def test_many_at_once_all_get_what_they_asked_for() -> None:
    async def check(registry: LoraRegistry, memory: Memory) -> None:
        digests = {name: _read(Path(name)).digest for name in "abc"}

        async def use(name: str) -> None:
            lease = await registry.lease(name)
            await asyncio.sleep(0)
            assert lease.lora.digest == digests[name]
            assert lease.lora.number in memory.numbers
            lease.release()

        await asyncio.gather(*(use(name) for name in itertools.islice(itertools.cycle("abcba"), 100)))

    run(check)


def test_removed_ones_are_dropped_when_nobody_uses_them() -> None:
    async def check(registry: LoraRegistry, memory: Memory) -> None:
        held = await registry.lease("a")
        registry.remove("a")
        assert held.lora.number in memory.numbers
        with pytest.raises(UnknownLoraError):
            await registry.lease("a")
        await registry.add(LoraModule("a", "/z"))
        (await registry.lease("a")).release()
        held.release()
        assert held.lora.number not in memory.numbers

    run(check)


def test_what_fails_changes_nothing() -> None:
    async def check(registry: LoraRegistry, memory: Memory) -> None:
        with pytest.raises(ModelError):
            await registry.add(LoraModule("new", "/broken"))
        with pytest.raises(LoraExistsError):
            await registry.add(LoraModule("a", "/z"))
        assert [module.name for module in registry.modules] == ["a", "b", "c"]
        with pytest.raises(UnknownLoraError):
            registry.remove("new")
        (await registry.lease("a")).release()

    run(check)


def test_one_name_is_loaded_once_by_those_who_ask_at_the_same_time() -> None:
    async def check(registry: LoraRegistry, memory: Memory) -> None:
        new = [LoraModule("new", path) for path in ("/slow-1", "/slow-2", "/slow-3")]
        found = await asyncio.gather(*map(registry.add, new), return_exceptions=True)
        assert [type(one) for one in found] == [type(None), LoraExistsError, LoraExistsError]
        assert [module.path for module in registry.modules if module.name == "new"] == ["/slow-1"]

    run(check)


def test_one_that_is_removed_while_it_is_read_leaves_nothing_behind() -> None:
    async def check(registry: LoraRegistry, memory: Memory) -> None:
        await registry.add(LoraModule("slow", "/slow"))
        for name in "ab":  # which take its room
            (await registry.lease(name)).release()
        before = set(memory.numbers)
        waiting = asyncio.create_task(registry.lease("slow"))
        await asyncio.sleep(0.03)
        registry.remove("slow")
        with pytest.raises(UnknownLoraError):
            await waiting
        assert memory.numbers < before
        assert registry.in_memory == ["b"]

    run(check)


@pytest.mark.parametrize("path", ["/slow", "/slow-broken"])
def test_who_goes_away_while_it_is_read_leaves_nothing_unknown_behind(path: str) -> None:
    async def check(registry: LoraRegistry, memory: Memory) -> None:
        waiting = asyncio.create_task(registry.add(LoraModule("new", path)))
        await asyncio.sleep(0.03)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(registry.in_memory) == len(memory.numbers)
        for name in "abc":
            lease = await registry.lease(name)
            assert len(registry.in_memory) == len(memory.numbers) == 2
            lease.release()

    run(check)


def test_only_so_many_may_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewheel.engine.adapters.registry.MAX_ADAPTERS", 2)

    async def check(registry: LoraRegistry, memory: Memory) -> None:
        for name in ("x", "y"):
            await registry.add(LoraModule(name, "/a"))
        with pytest.raises(ModelError, match="at most 2 adapters that were loaded: unload some"):
            await registry.add(LoraModule("z", "/a"))
        await registry.add(LoraModule("y", "/a"), replace=True)
        registry.remove("x")
        await registry.add(LoraModule("z", "/a"))

    run(check)
