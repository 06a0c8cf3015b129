"""Management: which models there are, as far as clients may change it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from tidewheel.engine.errors import ModelError, TidewheelError, quoted
from tidewheel.engine.files.wording import reason

from ..errors import ApiError, bad_request
from ..http.rights import require_administrator
from .pulls import Pull, Pulls

if TYPE_CHECKING:
    from ..http.api_keys import ApiKeys
    from ..http.options import HttpOptions
    from .catalog import Catalog, ModelEntry
    from .hosted_models import HostedModels
    from .managed_folder import ManagedFolder

_LOCAL = ("127.0.0.1", "::1", "localhost")
_REPOSITORY = "models--"  # begins the name of a repository's folder in a cache of the hub


def require_separate_key(keys: ApiKeys, options: HttpOptions) -> None:
    """Raises TidewheelError unless only some may change which models there are.

    These are keys that are marked for it; or, without any keys, those who are on this machine.
    """
    is_local = options.uds is not None or options.host in _LOCAL
    if not (keys.has_administrator if keys else is_local):
        raise TidewheelError(
            "--allow-model-management needs a key that is not everyone's: give --admin-api-key KEY, or mark keys with "
            "'admin' in --api-key-file"
        )


def required(management: Management | None) -> Management:
    """For a request that changes which models there are. Raises ApiError (403) if that is not allowed, or not to it."""
    if management is None:
        raise ApiError(
            HTTPStatus.FORBIDDEN,
            "this server's models are those that its operator names: start it with --allow-model-management and "
            "--models-dir to download, copy and delete them on request",
            code="management_not_allowed",
        )
    require_administrator()
    return management


class Management:
    """Downloads, copies and deletes models of a folder, which is a cache of the hub too.

    Only what lies in the cache is deleted. `on_pull` is called with each download that has news, `on_removed` with the
    name of each model that is gone.
    """

    def __init__(
        self,
        models: HostedModels,
        managed: ManagedFolder,
        on_pull: Callable[[Pull], None] = lambda pull: None,
        on_removed: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._models = models
        self._managed, self._copies = managed, managed.copies
        self._root = os.path.realpath(os.path.expanduser(managed.folder))
        self._on_removed = on_removed
        self._changing = asyncio.Lock()
        self.pulls = Pulls(managed.folder, self._pulled, on_pull)

    @property
    def _catalog(self) -> Catalog:
        return self._models.catalog

    def can_remove(self, entry: ModelEntry) -> bool:
        """Whether `delete` may delete it."""
        return entry.name in self._copies or (entry.is_found and self._is_cached(entry))

    async def copy(self, source: str, name: str) -> None:
        """Serve a model by one more name, also after a restart.

        Raises NotServed, and ApiError for a name that cannot be used, and if the copy cannot be kept.
        """
        async with self._changing:
            try:
                await self._copy(self._catalog.find(source), name)
            except ModelError as error:
                raise bad_request(str(error), "destination") from error

    async def delete(self, name: str) -> None:
        """Forget a copy; or delete the files of a model, and all copies of it.

        Raises NotServed, and ApiError for a model that runs requests or that only the operator can delete.
        """
        async with self._changing:
            entry = self._catalog.find(name)
            if not self.can_remove(entry):
                raise bad_request(
                    f"{quoted(entry.name)} was not downloaded by this server: its operator can take it away, from "
                    "--models-dir, --model or --config",
                    "model",
                )
            gone = [entry] if entry.name in self._copies else self._entries_of(entry)
            if others := [other.name for other in gone if not self.can_remove(other)]:
                raise bad_request(f"{quoted(entry.name)} is served as {others[0]} too, by its operator", "model")
            if entry.name not in self._copies:
                self._refuse_busy(entry)
            for one in gone:
                self._catalog.remove(one.name)
                self._on_removed(one.name)
            forgotten = [one.name for one in gone if self._copies.pop(one.name, None) is not None]
            self._models.follow()
            await self._keeping(partial(self._managed.forget, forgotten))
            if entry.is_found:
                await self._delete_files(entry.name)

    async def stop(self) -> None:
        """End all downloads."""
        await self.pulls.stop()

    async def _pulled(self, model: str, path: str) -> None:
        """A model lies in the cache at that path: serve it by the name that it was asked for."""
        async with self._changing:
            await self._rescan()
            entry = next((one for one in self._catalog.entries if model in (one.name, *one.aliases)), None)
            if entry is None:
                entry = next((one for one in self._catalog.entries if _lies_at(path, one.where)), None)
                if entry is None:
                    raise ModelError(f"{model} was downloaded, and no model was found in it")
                entry = await self._copy(entry, model)
        if entry.error is not None:
            raise ModelError(f"{model} was downloaded, and cannot be served: {entry.error}")

    async def _copy(self, of: ModelEntry, name: str) -> ModelEntry:
        """One more name of a model, which may be a copy. Raises ModelError and ApiError."""
        source = self._copies.get(of.name, of.name)
        entry = self._catalog.copy(source, name)
        try:
            await self._keeping(partial(self._managed.keep, name, source))
        except ApiError:
            self._catalog.remove(name)
            raise
        self._copies[name] = source
        self._models.follow()
        return entry

    async def _keeping(self, change: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(change)
        except (ModelError, OSError) as error:
            message = f"the copies of models cannot be kept: {reason(error)}"
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message) from error

    async def _rescan(self) -> None:
        for entry in (await self._models.rescan()).removed:
            self._on_removed(entry.name)

    def _refuse_busy(self, entry: ModelEntry) -> None:
        if entry.error is not None:
            return
        status = self._models.status(entry)
        if status.leases or status.waiting:
            raise ApiError(
                HTTPStatus.CONFLICT,
                f"the model {quoted(entry.name)} answers requests: delete it when they are done",
                param="model",
                code="model_busy",
            )

    async def _delete_files(self, name: str) -> None:
        from tidewheel.engine.weights.hub_cache import remove_model  # with the hub's client, which takes a while

        try:
            await asyncio.to_thread(remove_model, name, self._root)
        except TidewheelError as error:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
        finally:
            await self._rescan()

    def _entries_of(self, entry: ModelEntry) -> list[ModelEntry]:
        """All that have its files."""
        return [one for one in self._catalog.entries if _lies_at(one.where, entry.where)]

    def _is_cached(self, entry: ModelEntry) -> bool:
        place = os.path.relpath(os.path.abspath(os.path.expanduser(entry.where)), self._root)
        return place.startswith(_REPOSITORY)


def _lies_at(path: str, where: str) -> bool:
    """Whether a model's path is that of another one, or a file in its folder."""
    one, other = _place(path), _place(where)
    return one == other or (os.path.isdir(other) and os.path.dirname(one) == other)


def _place(path: str) -> str:
    """A path whose folder is a real one; files of a cache are links."""
    folder, name = os.path.split(os.path.abspath(os.path.expanduser(path)))
    return os.path.join(os.path.realpath(folder), name)
