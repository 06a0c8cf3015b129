"""SharedAdapters: the adapters that clients have loaded, in a store of several replicas."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection
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
    """An adapter as it lies in the store; `version` is another one each time that it is loaded in place.

    `model` is the one that it was loaded for, by a server of several.
    """

    name: str
    path: str
    base_model_name: str | None
    version: str
    revision: str | None = None  # the commit of a hub id, so that all replicas have the same one
    model: str | None = None

    @property
    def module(self) -> LoraModule:
        """The adapter as the registry takes it."""
        if self.revision is None:
            return LoraModule(self.name, self.path, self.base_model_name)
        return HubModule(self.name, self.path, self.base_model_name, revision=self.revision)


class _DamagedError(ApiError):
    def __init__(self, name: str) -> None:
        super().__init__(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            f"the entry of the adapter {quoted(name)} is damaged: unload it, and load it again",
            param="model",
            code="damaged_adapter",
        )


class SharedAdapters:
    """Names and paths of adapters are in the store. Each replica reads one when a request first names it there.

    What another replica has changed is noticed by the next request that names the adapter, or the next listing. The
    adapters that options name are each replica's own, and have no entry. Adapters of other models are none of this one.
    """

    def __init__(self, store: SharedStore, loras: LoraRegistry, names: Collection[str] = ()) -> None:
        """`names` are those of the model on a server of several."""
        self._store = store
        self._loras = loras
        self._names = names
        self._listed: dict[str, _Entry] = {}  # as the store had them when it was asked last
        self._num_stored = 0  # of all models
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
        stored = await self._store.values(_ADAPTERS)
        self._num_stored = len(stored)
        for raw in stored:
            try:
                entry = msgspec.json.decode(raw, type=_Entry)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.warning("An adapter's entry in %s is damaged: %s", self._store.shown, error)
                continue
            if self._belongs(entry):
                found[entry.name] = entry
        self._listed = {name: entry for name, entry in found.items() if not self._is_own(name)}
        for name in [*self._loaded]:
            self._forget_if_changed(name)

    async def refresh_one(self, name: str) -> None:
        """Asks for the adapter that a request names. Raises StoreError, and ApiError (500) for a damaged entry."""
        if self._is_own(name):
            return
        entry = await _read(self._store, name)
        if entry is None or not self._belongs(entry):
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

    async def add(self, module: LoraModule, *, replace: bool, model: str | None = None) -> None:
        """Has all replicas serve one more, or another one under its name. `model` is one of the `names`.

        Raises LoraExistsError, ModelError for a broken one, ApiError (400) where there is no room, and StoreError.
        """
        name = module.name
        before = await _read(self._store, name)
        if before is not None and not self._belongs(before):
            raise LoraExistsError(f"an adapter of another model is named {quoted(name)} already")
        if not replace and (self._is_own(name) or before is not None):  # before it is downloaded
            raise LoraExistsError(f"an adapter is named {quoted(name)} already")
        entry = _new_entry(await self._loras.fetch(module), model if self._names else None)
        async with self._changing:
            await self.refresh()
            if self._is_own(name) or (name in self._listed and not replace):
                raise LoraExistsError(f"an adapter is named {quoted(name)} already")
            if self._num_stored >= _MOST:
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
        try:
            entry = await _read(self._store, name)
            is_there = entry is not None and self._belongs(entry)
        except _DamagedError:
            is_there = True
        was_there = is_there and await self._store.delete(_ADAPTERS, name)
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

    def _belongs(self, entry: _Entry) -> bool:
        return entry.model in self._names if self._names else entry.model is None


async def model_of_adapter(store: SharedStore, name: str) -> str | None:
    """The model that an adapter was loaded for, by this server of several or by another one. Raises as `refresh_one`.

    None if there is no such adapter.
    """
    entry = await _read(store, name)
    return None if entry is None else entry.model


async def _read(store: SharedStore, name: str) -> _Entry | None:
    raw = await store.get(_ADAPTERS, name)
    if raw is None:
        return None
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.warning("The entry of the adapter %s in %s is damaged: %s", name, store.shown, error)
        raise _DamagedError(name) from None
    return entry if entry.name == name else None


def _new_entry(module: LoraModule, model: str | None) -> _Entry:
    # Other replicas may have been started in other folders.
    revision = module.revision if isinstance(module, HubModule) else None
    path = os.path.abspath(module.path) if revision is None else module.path
    return _Entry(module.name, path, module.base_model_name, new_id(), revision, model)
