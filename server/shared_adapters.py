"""SharedAdapters: the adapters that clients have loaded, in a store of several replicas."""

from __future__ import annotations

import asyncio
import logging
import os
from http import HTTPStatus

import msgspec

from tidewheel.engine.adapters.options import HubModule, LoraModule
from tidewheel.engine.adapters.registry import LoraExistsError, LoraRegistry, UnknownLoraError
from tidewheel.engine.errors import quoted

from .errors import ApiError, bad_request
from .ids import new_id
from .stores.base import Kind, SharedStore

logger = logging.getLogger(__name__)

_ADAPTERS = Kind(name="adapters")
_MOST = 1000


class _Entry(msgspec.Struct):
    """An adapter as it lies in the store; `version` is another one each time that it is loaded in place."""

    name: str
    path: str
    base_model_name: str | None
    version: str
    revision: str | None = None  # the commit of a hub id, so that all replicas have the same one

    @property
    def module(self) -> LoraModule:
        """The adapter as the registry takes it."""
        if self.revision is None:
            return LoraModule(self.name, self.path, self.base_model_name)
        return HubModule(self.name, self.path, self.base_model_name, revision=self.revision)


class SharedAdapters:
    """Names and paths of adapters are in the store. Each replica reads one when a request first names it there.

    What another replica has changed is noticed by the next request that names the adapter, or the next listing. The
    adapters that options name are each replica's own, and have no entry.
    """

    def __init__(self, store: SharedStore, loras: LoraRegistry) -> None:
        self._store = store
        self._loras = loras
        self._listed: dict[str, _Entry] = {}  # as the store had them when it was asked last
        self._loaded: dict[str, str] = {}  # the version that this replica's registry has
        self._loading: set[str] = set()
        self._changing = asyncio.Lock()

    @property
    def modules(self) -> list[LoraModule]:
        """All that the store had when it was asked last, and this replica has not loaded yet."""
        return [entry.module for entry in self._listed.values() if entry.name not in self._loaded]

    async def refresh(self) -> None:
        """Asks for all adapters. Raises StoreError. One whose entry is damaged is left out, and logged."""
        found: dict[str, _Entry] = {}
        for raw in await self._store.values(_ADAPTERS):
            try:
                entry = msgspec.json.decode(raw, type=_Entry)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.warning("An adapter's entry in %s is damaged: %s", self._store.shown, error)
                continue
            found[entry.name] = entry
        self._listed = {name: entry for name, entry in found.items() if not self._is_own(name)}
        for name in [*self._loaded]:
            self._forget_if_changed(name)

    async def refresh_one(self, name: str) -> None:
        """Asks for the adapter that a request names. Raises StoreError, and ApiError (500) for a damaged entry."""
        if self._is_own(name):
            return
        entry = await self._read(name)
        if entry is None:
            self._listed.pop(name, None)
        else:
            self._listed[name] = entry
        self._forget_if_changed(name)

    async def load(self, name: str) -> None:
        """Reads an adapter that the store has, if that was not done yet; one of the hub is downloaded.

        Raises what LoraRegistry.add raises.
        """
        while (entry := self._listed.get(name)) is not None and self._loaded.get(name) != entry.version:
            await self._loras.fetch(entry.module)  # the others need not wait for that
            async with self._changing:
                # While it was downloaded, it may have been loaded, replaced or unloaded.
                if self._listed.get(name) == entry and self._loaded.get(name) != entry.version:
                    await self._load(entry)

    async def add(self, module: LoraModule, *, replace: bool) -> None:
        """Has all replicas serve one more, or another one under its name.

        Raises LoraExistsError, ModelError for a broken one, ApiError (400) where there is no room, and StoreError.
        """
        name = module.name
        if not replace and (self._is_own(name) or await self._read(name) is not None):  # before it is downloaded
            raise LoraExistsError(f"an adapter is named {quoted(name)} already")
        entry = _new_entry(await self._loras.fetch(module))
        async with self._changing:
            await self.refresh()
            if self._is_own(name) or (name in self._listed and not replace):
                raise LoraExistsError(f"an adapter is named {quoted(name)} already")
            if len(self._listed) >= _MOST:
                raise bad_request(f"{_MOST} adapters are loaded already: unload some", "lora_name")
            await self._load(entry)
            self._listed[name] = entry
            was_put = False
            try:
                value = msgspec.json.encode(entry)
                was_put = await self._store.put(_ADAPTERS, name, value, "always" if replace else "new")
            finally:
                if not was_put:  # the next request finds out what the store has
                    self._listed.pop(name, None)
                    self._forget_if_changed(name)
            if not was_put:
                raise LoraExistsError(f"an adapter is named {quoted(name)} already")

    async def remove(self, name: str) -> None:
        """Has no replica serve it any more. Raises UnknownLoraError, and ApiError (400) for one of the options."""
        if self._is_own(name):
            raise bad_request(
                f"the adapter {quoted(name)} was named by an option of the server, and cannot be unloaded",
                "lora_name",
            )
        was_there = await self._store.delete(_ADAPTERS, name)
        self._listed.pop(name, None)
        self._forget_if_changed(name)
        if not was_there:
            raise UnknownLoraError(f"no adapter is named {quoted(name)}")

    async def _load(self, entry: _Entry) -> None:
        self._loading.add(entry.name)
        try:
            await self._loras.add(entry.module, replace=True)
            self._loaded[entry.name] = entry.version
        finally:
            self._loading.discard(entry.name)

    def _is_own(self, name: str) -> bool:
        """Whether an option of this replica names the adapter, or the folder that it is in."""
        if name in self._loaded or name in self._loading:
            return False
        return any(module.name == name for module in self._loras.modules)

    def _forget_if_changed(self, name: str) -> None:
        entry = self._listed.get(name)
        if name in self._loaded and (entry is None or entry.version != self._loaded[name]):
            del self._loaded[name]
            self._loras.remove(name)

    async def _read(self, name: str) -> _Entry | None:
        raw = await self._store.get(_ADAPTERS, name)
        if raw is None:
            return None
        try:
            entry = msgspec.json.decode(raw, type=_Entry)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("The entry of the adapter %s in %s is damaged: %s", name, self._store.shown, error)
            raise ApiError(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"the entry of the adapter {quoted(name)} is damaged: unload it, and load it again",
                param="model",
                code="damaged_adapter",
            ) from None
        return entry if entry.name == name else None


def _new_entry(module: LoraModule) -> _Entry:
    # Other replicas may have been started in other folders.
    revision = module.revision if isinstance(module, HubModule) else None
    path = os.path.abspath(module.path) if revision is None else module.path
    return _Entry(module.name, path, module.base_model_name, new_id(), revision)
