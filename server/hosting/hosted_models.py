"""HostedModels: a server's models by their names, and the units that they are loaded with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import cast

from tidewheel.engine.errors import EngineDeadError, TidewheelError, quoted
from tidewheel.engine.hosting.budget import MemoryBudget
from tidewheel.engine.hosting.cores import SharedCores
from tidewheel.engine.hosting.host import ModelHost
from tidewheel.engine.hosting.units import LoadFailedError, NotHostedError, Report, UnitStatus

from ..app_resources import AppResources
from ..errors import ApiError
from ..http.json_limits import MIN_VALUES, values_limit
from ..responses.store import Responses
from ..shared_adapters import model_of_adapter
from .catalog import Catalog, Changes, ModelEntry, group_into_units
from .folder_watch import watch_folder
from .unit import LoadedModel, ModelUnit, Shared

logger = logging.getLogger(__name__)

_SETTLED_S = 10.0  # after which a model that was loaded is likely to stay


class HostedModels:
    """All models of a server. An engine that fails ends only its own model. See `Engines` of http/server.py."""

    failure: BaseException | None = None

    def __init__(
        self,
        catalog: Catalog,
        resources: AppResources,
        responses: Responses,
        budget: MemoryBudget,
        max_loaded: int | None = None,
    ) -> None:
        """`max_loaded` is how many units may be loaded at a time; None: as many as the budget has room for."""
        self.catalog = catalog
        self.budget = budget
        self.max_loaded = max_loaded
        self.on_drain: Callable[[], Awaitable[None]] | None = None
        """Ends what would keep connections open, when the server is to end."""
        self._units: dict[str, ModelUnit] = {}  # by the names of entries
        self._shared = Shared(resources, responses, SharedCores(), budget.total_bytes)
        self._leaving: set[asyncio.Future[object]] = set()
        self.host = ModelHost((), budget, max_loaded=max_loaded)
        self.follow()
        self.is_draining = False
        self._background: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Load what is to be loaded at the start, one after the other, and follow what comes into the folder."""
        self._background = [asyncio.create_task(self._preload())]
        if self.catalog.folder is not None:
            self._background.append(asyncio.create_task(watch_folder(self.catalog.folder, self.rescan)))

    async def stop(self) -> None:
        """Unload everything."""
        for task in self._background:
            task.cancel()
        await self.host.stop()
        self._shared.cores.close()

    def find(self, name: str | None) -> ModelEntry:
        """See Catalog. Loaded models are asked for adapters that they find by themselves."""
        if name is not None and not self.catalog.knows(name):
            for entry_name, unit in self._units.items():
                chat = None if unit.loaded is None else unit.loaded.engines.chat
                if chat is not None and chat.loras is not None and chat.loras.knows(name):
                    return self.catalog.find(entry_name)
        return self.catalog.find(name)

    async def find_asked(self, name: str | None) -> ModelEntry:
        """What `find_known` knows, or else `find` finds. Raises ApiError."""
        known = None if name is None else await self.find_known(name)
        return known or self.find(name)

    async def find_known(self, name: str) -> ModelEntry | None:
        """The model of that name, or with an adapter of that name, which may be in a store. Raises ApiError."""
        if self.catalog.knows(name):
            return self.catalog.find(name)
        if (store := self._shared.resources.shared_store) is None:
            return None
        model = await model_of_adapter(store, name)
        return self.catalog.find(model) if model is not None and self.catalog.knows(model) else None

    @property
    def shares_adapters(self) -> bool:
        """Whether adapters that clients load are in a store."""
        return self._shared.resources.shared_store is not None

    async def default_encoder(self) -> ModelEntry:
        """The model of requests that name none and are for an encoder: the first one, or else that of all requests.

        The files of models are looked at for this, in a thread.
        """
        units = [(entry, self._units[entry.name]) for entry in self.catalog.entries if entry.error is None]
        found = await asyncio.to_thread(lambda: next((entry for entry, unit in units if unit.is_encoder()), None))
        return found or self.catalog.find(None)

    @property
    def max_values(self) -> int:
        """How many values the JSON of a request may have, for the longest context that the options name."""
        return max((values_limit(entry.max_model_len or 0) for entry in self.catalog.entries), default=MIN_VALUES)

    def follow(self) -> None:
        """Have the units that the catalog's entries need now. Those that are in use leave when their requests are done.

        Raises TidewheelError if a name cannot be served by what is loaded.
        """
        before = {unit.name: unit for unit in self._units.values()}
        units: dict[str, ModelUnit] = {}
        added = []
        for spec in group_into_units(self.catalog.entries):
            unit = before.get(spec.name)
            if unit is not None and unit.fits(spec):
                unit.take(spec)
                del before[spec.name]
            else:
                unit = ModelUnit(spec, self._shared)
                added.append(unit)
            units |= dict.fromkeys((entry.name for entry in spec.entries), unit)
        for name in before:
            leaving = asyncio.ensure_future(self.host.remove(name))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        for unit in added:
            self.host.add(unit)
        self._units = units

    async def rescan(self) -> Changes:
        """Look at the folder of models again. Raises TidewheelError."""
        changes = await self.catalog.rescan()
        self.follow()
        return changes

    def knows(self, entry: ModelEntry) -> bool:
        """Whether an entry is still served, or has an error for all who ask for it."""
        return entry.error is not None or entry.name in self._units

    def names_of(self, unit: str) -> list[str]:
        """The names of the entries of a unit."""
        return [name for name, one in self._units.items() if one.name == unit]

    def expires_at(self, status: UnitStatus) -> float | None:
        """When it will be unloaded, in seconds since 1970; None: it is in use, or stays."""
        return None if status.expires_at is None else time.time() + status.expires_at - time.monotonic()

    def unit(self, entry: ModelEntry) -> ModelUnit:
        """What an entry is loaded with. Raises ApiError if its files cannot be served."""
        if entry.error is not None:
            raise _load_failed(f"the model {quoted(entry.name)} cannot be served: {entry.error}")
        return self._units[entry.name]

    def status(self, entry: ModelEntry) -> UnitStatus:
        """Whether an entry's unit is loaded. Raises ApiError if its files cannot be served."""
        return self.host.status(self.unit(entry).name)

    def is_ready(self, entry: ModelEntry) -> bool:
        """Whether `lease` gives it at once. Raises ApiError, and EngineDeadError."""
        return self.host.is_ready(self.unit(entry).name)

    @asynccontextmanager
    async def lease(
        self, entry: ModelEntry, *, keep_alive_s: float | None = None, report: Report | None = None
    ) -> AsyncIterator[LoadedModel]:
        """See ModelHost. Raises ApiError, BusyError and EngineDeadError."""
        if self.is_draining:
            raise shutting_down()
        try:
            async with self.host.lease(self.unit(entry).name, keep_alive_s=keep_alive_s, report=report) as loaded:
                yield cast(LoadedModel, loaded)
        except LoadFailedError as error:
            raise _load_failed(str(error)) from error
        except NotHostedError as error:
            raise ApiError(HTTPStatus.NOT_FOUND, str(error), param="model", code="model_not_found") from error

    @property
    def loaded(self) -> Iterator[LoadedModel]:
        """What is loaded now."""
        return (unit.loaded for unit in dict.fromkeys(self._units.values()) if unit.loaded is not None)

    @property
    def is_alive(self) -> bool:
        """Whether an engine's thread runs."""
        return any(model.engines.is_alive for model in self.loaded)

    @property
    def has_stalled(self) -> bool:
        """Whether a step took longer than --step-timeout."""
        return any(model.engines.has_stalled for model in self.loaded)

    def warm_up(self) -> None:
        """Prepare for what requests may ask for, where models stay and nothing runs.

        It takes a core for half a second, and the interpreter's lock: streams of other models would stand still, and
        switching between models would take twice as long.
        """
        settled = time.monotonic() - _SETTLED_S
        if all(model.engines.is_idle and model.loaded_at < settled for model in self.loaded):
            for model in self.loaded:
                model.engines.warm_up()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for those that run; after `timeout_s` abort the rest."""
        self.is_draining = True
        if self.on_drain is not None:
            await self.on_drain()
        await asyncio.gather(*(model.engines.drain(timeout_s) for model in self.loaded))

    async def _preload(self) -> None:
        for unit in dict.fromkeys(self._units.values()):
            if unit.spec.preload:
                try:
                    await self.host.load(unit.name)
                except TidewheelError as error:
                    logger.error("%s", error)


def shutting_down() -> EngineDeadError:
    """What a request gets that waits or comes when the server ends."""
    return EngineDeadError("the server is shutting down")


def _load_failed(message: str) -> ApiError:
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, param="model", code="model_load_failed")
