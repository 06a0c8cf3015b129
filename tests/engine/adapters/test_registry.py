"""The registry: so many adapters in memory, none taken away from those who use it, and nobody left waiting."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidewheel.engine.adapters.options import LoraModule, LoraOptions
from tidewheel.engine.adapters.registry import LoraExistsError, LoraRegistry, UnknownLoraError
from tidewheel.engine.errors import ModelError
from tidewheel.engine.weights.lora import LoraAdapter, LowRankUpdate

_MODULES = tuple(LoraModule(name, name) for name in "abc")


def _read(path: Path) -> LoraAdapter:
    if path.name == "broken":
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
        registry = LoraRegistry(options, _read, memory)
        registry.load_modules()
        try:
            await asyncio.wait_for(check(registry, memory), 30)
        finally:
            registry.close()
        assert memory.most <= max_cpu_loras

    asyncio.run(main())


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
        await registry.add(LoraModule("a", "z"))
        (await registry.lease("a")).release()
        held.release()
        assert held.lora.number not in memory.numbers

    run(check)


def test_what_fails_changes_nothing() -> None:
    async def check(registry: LoraRegistry, memory: Memory) -> None:
        with pytest.raises(ModelError):
            await registry.add(LoraModule("new", "broken"))
        with pytest.raises(LoraExistsError):
            await registry.add(LoraModule("a", "z"))
        assert [module.name for module in registry.modules] == ["a", "b", "c"]
        with pytest.raises(UnknownLoraError):
            registry.remove("new")
        (await registry.lease("a")).release()

    run(check)
