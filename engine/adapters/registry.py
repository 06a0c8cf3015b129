"""LoraRegistry: the adapters that are served, and which of them are in memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..devices.executor import Executor
from ..errors import ModelError, TidewheelError, quoted
from ..weights.lora import LoraAdapter
from .lora import Lora
from .options import LoraModule, LoraOptions
from .threads import in_thread

if TYPE_CHECKING:
    from .hub import AdapterHub

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 1000  # in addition to the options' adapters; each one is listed, and its name remembered
_LOWEST_PRIORITY = 19
_NAME_OF_A_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class UnknownLoraError(TidewheelError):
    """No adapter of that name is served."""


class LoraExistsError(TidewheelError):
    """An adapter of that name is served already."""


@dataclass(eq=False)
class _Entry:
    module: LoraModule
    lora: Lora | None = None  # None: not in memory
    rope_factor: float | None = None  # None: it has not been read yet
    users: int = 0
    is_leaving: bool = False  # no new request may use it: another one needs its room, or it was removed
    unused: asyncio.Event = field(default_factory=asyncio.Event)


class LoraLease:
    """The use of an adapter by one request. It stays in memory until `release`."""

    def __init__(self, name: str, lora: Lora, release: Callable[[], None]) -> None:
        self.name = name
        self.lora = lora
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Give the adapter back. Later calls do nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()


class LoraUse(NamedTuple):
    """Names of adapters: of sequences that run, and of those that wait for their turn or for the adapter itself."""

    running: list[str]
    waiting: list[str]


def adapter_in(folder: str, name: str) -> str | None:
    """Where an adapter lies in a folder of `--lora-resolver-cache-dir`; None if there is none of that name."""
    if _NAME_OF_A_FOLDER.fullmatch(name) is None:
        return None
    path = os.path.join(folder, name)
    return path if os.path.isdir(path) else None


class LoraRegistry:
    """Adapters by name. At most `options.max_in_memory` are in memory; the least recently used makes way.

    `read` reads a path; it raises ModelError. `hub` has the files of adapters whose paths are hub ids. All but
    `load_modules` is called on the event loop. Files are read in a thread that has the priority of others: while it
    holds the interpreter's lock, all wait for it. What was read is given to the executor, which drops the lock, in a
    thread of the lowest priority.
    """

    def __init__(
        self,
        options: LoraOptions,
        read: Callable[[Path], LoraAdapter],
        executor: Executor,
        hub: AdapterHub,
    ) -> None:
        """`drop` frees a number; an engine sets it, to have it done when its thread uses the number no more."""
        self._most = options.max_in_memory
        self._modules = options.lora_modules
        self._folder = options.lora_resolver_cache_dir
        self.has_longer_contexts = bool(options.long_lora_scaling_factors)
        self.max_loras = options.max_loras
        self.allows_updates = options.allow_runtime_lora_updating
        self._read = read
        self._executor = executor
        self._hub = hub
        self.drop: Callable[[int], None] = executor.drop_lora
        self._entries: dict[str, _Entry] = {}
        self._in_memory: list[_Entry] = []  # the least recently used first
        self._awaited: Counter[str] = Counter()  # by name, the requests that wait until it is in memory
        self._numbers = itertools.count()
        self._loading = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lora", initializer=give_way)

    @property
    def modules(self) -> list[LoraModule]:
        """All that are served, in memory or not."""
        return [entry.module for entry in self._entries.values()]

    @property
    def in_memory(self) -> list[str]:
        """The names of the adapters that are in memory."""
        return [name for name, entry in self._entries.items() if entry.lora is not None]

    def rope_factor(self, name: str) -> float | None:
        """How many times longer its context is than the model's own; None if it was never read."""
        entry = self._entries.get(name)
        return None if entry is None else entry.rope_factor

    def load_modules(self) -> None:
        """Read the adapters that the options name, before anything is served. Raises ModelError for a broken one."""
        for module in self._modules:
            entry = self._entries[module.name] = _Entry(module)
            if len(self._in_memory) == self._most:
                self._evict(self._in_memory[0])
            self._enter(entry, self._load(module))

    def knows(self, name: str) -> bool:
        """Whether requests may name it: it is served, or a folder where adapters are looked for."""
        return name in self._entries or self._found(name) is not None

    def used(self, running: Set[int], waiting: Set[int]) -> LoraUse:
        """The adapters of sequences, which have these numbers; from any thread."""
        # What is evicted meanwhile loses its `lora`.
        in_memory = [(entry.lora, entry.module.name) for entry in list(self._in_memory)]
        names = {lora.number: name for lora, name in in_memory if lora is not None}
        awaited = {name for name, count in list(self._awaited.items()) if count}
        return LoraUse(
            sorted({names[number] for number in running & names.keys()}),
            sorted({names[number] for number in waiting & names.keys()} | awaited),
        )

    async def lease(self, name: str) -> LoraLease:
        """The adapter of that name in memory, read if need be. Raises UnknownLoraError and ModelError."""
        self._awaited[name] += 1
        try:
            return await self._leased(name)
        finally:
            self._awaited[name] -= 1
            if not self._awaited[name]:
                del self._awaited[name]

    async def _leased(self, name: str) -> LoraLease:
        while True:
            entry = self._entries.get(name)
            if entry is None:
                found = self._found(name)
                if found is None:
                    raise UnknownLoraError(f"no adapter is named {quoted(name)}")
                with contextlib.suppress(LoraExistsError):  # another request was quicker
                    await self.add(found)
                continue
            if entry.lora is not None and not entry.is_leaving:
                self._in_memory.remove(entry)
                self._in_memory.append(entry)
                return self._lend(entry, entry.lora)
            async with self._loading:
                if entry.lora is None and self._entries.get(name) is entry:
                    await self._make_room()
                    await _to_its_end(self._load_again(entry))

    async def fetch(self, module: LoraModule) -> LoraModule:
        """The module with its files on this machine. Raises what AdapterHub.fetch raises."""
        return await self._hub.fetch(module)

    async def add(self, module: LoraModule, *, replace: bool = False) -> None:
        """Serve one more, or another one under its name, downloaded if need be.

        Raises LoraExistsError, ModelError for a broken one, and what `fetch` raises.
        """
        if module.name in self._entries and not replace:  # known before anything is downloaded
            raise LoraExistsError(f"an adapter is named {quoted(module.name)} already")
        module = await self.fetch(module)
        async with self._loading:
            if module.name in self._entries and not replace:
                raise LoraExistsError(f"an adapter is named {quoted(module.name)} already")
            if module.name not in self._entries and len(self._entries) >= MAX_ADAPTERS + len(self._modules):
                raise ModelError(f"this server keeps at most {MAX_ADAPTERS} adapters that were loaded: unload some")
            await self._make_room()
            await _to_its_end(self._load_new(module))

    def remove(self, name: str) -> None:
        """Serve it no more; requests that use it go on. Raises UnknownLoraError."""
        entry = self._entries.pop(name, None)
        if entry is None:
            raise UnknownLoraError(f"no adapter is named {quoted(name)}")
        entry.is_leaving = True
        if entry.lora is not None and not entry.users:
            self._evict(entry)

    def close(self) -> None:
        """Read no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _found(self, name: str) -> LoraModule | None:
        path = None if self._folder is None else adapter_in(self._folder, name)
        return None if path is None else LoraModule(name, path)

    def _lend(self, entry: _Entry, lora: Lora) -> LoraLease:
        entry.users += 1
        entry.unused.clear()
        return LoraLease(entry.module.name, lora, lambda: self._take_back(entry))

    def _take_back(self, entry: _Entry) -> None:
        entry.users -= 1
        if entry.users:
            return
        entry.unused.set()
        if self._entries.get(entry.module.name) is not entry and entry.lora is not None:
            self._evict(entry)

    async def _make_room(self) -> None:
        while len(self._in_memory) >= self._most:
            unused = next((entry for entry in self._in_memory if not entry.users), None)
            if unused is not None:
                self._evict(unused)
                continue
            # All are in use. Who comes now for the one that makes way has to wait, or it would be in use for ever.
            first = self._in_memory[0]
            first.is_leaving = True
            try:
                await first.unused.wait()
            finally:
                first.is_leaving = self._entries.get(first.module.name) is not first

    def _enter(self, entry: _Entry, lora: Lora) -> None:
        entry.lora, entry.rope_factor = lora, lora.rope_factor
        self._in_memory.append(entry)

    def _evict(self, entry: _Entry) -> None:
        assert entry.lora is not None
        self._in_memory.remove(entry)
        self.drop(entry.lora.number)
        entry.lora = None

    async def _load_again(self, entry: _Entry) -> None:
        self._enter(entry, await self._load_in_thread(entry.module))
        if self._entries.get(entry.module.name) is not entry:  # it was removed meanwhile
            self._evict(entry)

    async def _load_new(self, module: LoraModule) -> None:
        lora = await self._load_in_thread(module)
        if module.name in self._entries:
            self.remove(module.name)
        entry = self._entries[module.name] = _Entry(module)
        self._enter(entry, lora)

    async def _load_in_thread(self, module: LoraModule) -> Lora:
        adapter = await in_thread("adapter-reader", lambda: self._read(self._hub.path(module)))
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._give, module, adapter)

    def _load(self, module: LoraModule) -> Lora:
        return self._give(module, self._read(self._hub.path(module)))

    def _give(self, module: LoraModule, adapter: LoraAdapter) -> Lora:
        lora = Lora(next(self._numbers), adapter.digest, adapter.rope_factor)
        self._executor.load_lora(lora.number, adapter)
        logger.info("Loaded the adapter %s of rank %d from %s", quoted(module.name), adapter.rank, module.path)
        return lora


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for a thread's work. It cannot be stopped, so a cancelled task waits too, and what it loads is known."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nothing else asks for it
        raise


def give_way() -> None:
    """Let the threads that compute go before this one."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
