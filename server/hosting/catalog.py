"""Which models a server has: those that its operator names, and those of a folder. No weights are read here."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from http import HTTPStatus
from itertools import islice
from typing import Any

from msgspec import Struct, structs

from tidewheel.engine.adapters.registry import adapter_in
from tidewheel.engine.errors import ModelError, quoted, shortened

from ..errors import ApiError
from ..options.hosting import ModelSection, wrong_name
from ..options.model_sections import MAX_MODELS
from ..options.serve import ServeOptions, options_of_model
from .models_folder import FoundModel, models_in_folder
from .near_names import near_names

logger = logging.getLogger(__name__)

_MOST_FILES = 10_000  # of a folder, whose size is told
_MAX_NAMED = 16  # of the models that are served, in an error
_LATEST = ":latest"  # Ollama's tag of a name without one


class ModelEntry:
    """A model by its name. `error` says why it cannot be served, if that is known without loading it.

    `where` is a folder, a file or a hub id. A pinned model is never unloaded, `preload` asks for it at the start, and
    `idle_s` is after how many seconds without a request it is unloaded, None for never.
    """

    def __init__(
        self,
        shared: ServeOptions,
        section: ModelSection,
        where: str,
        *,
        error: str | None = None,
        fingerprint: tuple[int, ...] = (),
        is_found: bool = False,
    ) -> None:
        self._shared = shared
        self.section = section
        self.name = section.name
        self.aliases = section.aliases
        self.where = where
        self.error = error
        self.pinned = section.pin
        self.preload = section.preload
        self.idle_s = section.idle_s if section.has_idle else shared.hosting.model_idle_timeout_s
        self.fingerprint = fingerprint
        """Numbers that change when its files in the folder are replaced."""
        self.is_found = is_found
        """Whether it is only in the folder of models, and nobody has named it."""

    @cached_property
    def options(self) -> ServeOptions:
        """Its own options, and for the rest those of all models."""
        return self.options_with({}, is_encoder=self.is_named_encoder)

    @cached_property
    def encoder_options(self) -> ServeOptions:
        """Its options if it turns out to be an encoder (see `pools`): without what all models have for generating."""
        return self.options_with({}, is_encoder=True)

    def options_with(self, given: Mapping[str, Any], *, is_encoder: bool) -> ServeOptions:
        """Its options with some replaced, by name."""
        section = structs.replace(self.section, given={**self.section.given, **given})
        return options_of_model(self._shared, section, self.where, is_encoder=is_encoder)

    @property
    def is_named_encoder(self) -> bool:
        """Whether the options say that it is an encoder, so that its files need not be looked at."""
        return bool(self.section.given.get("runner", self._shared.given.get("runner")) == "pooling")

    @property
    def max_model_len(self) -> int | None:
        """Its context in tokens, where that was given: the engine that it shares may have a longer one."""
        shared = None if self.is_named_encoder else self._shared.given.get("max_model_len")
        length: int | None = self.section.given.get("max_model_len", shared)  # without making all options
        return length

    @property
    def adapters(self) -> Sequence[str]:
        """The names of its adapters that the options name."""
        return [module.name for module in self.section.given.get("lora_modules", ())]

    @cached_property
    def file_bytes(self) -> int | None:
        """The size of its files; None if they are not on this machine, or cannot be looked at."""
        if self.fingerprint:
            return sum(self.fingerprint[1::3])
        path = os.path.expanduser(self.where)
        try:
            if not os.path.isdir(path):
                return os.path.getsize(path)
            with os.scandir(path) as files:
                return sum(file.stat().st_size for file in islice(files, _MOST_FILES) if file.is_file())
        except OSError:
            return None

    def finds_adapter(self, name: str) -> bool:
        """Whether it has an adapter of that name in its `--lora-resolver-cache-dir`, read once it is named."""
        folder = self.section.given.get("lora_resolver_cache_dir")
        return folder is not None and self.error is None and adapter_in(folder, name) is not None


class UnitSpec:
    """Entries that are presets of one loaded model: the same file, and the same options of the engine but its context.

    The unit has the longest context of them. It is pinned or loaded at the start if one of them is, and unloaded when
    none of them keeps it any longer.
    """

    def __init__(self, entries: Sequence[ModelEntry]) -> None:
        self.entries = entries
        self.name = entries[0].name
        self.pinned = any(entry.pinned for entry in entries)
        self.preload = any(entry.preload for entry in entries)
        idle = [entry.idle_s for entry in entries]
        self.idle_s = None if None in idle else max(filter(None, idle))

    @cached_property
    def options(self) -> ServeOptions:
        """Those of its first entry, with the longest context."""
        return self._joined([entry.options for entry in self.entries], is_encoder=self.entries[0].is_named_encoder)

    @cached_property
    def encoder_options(self) -> ServeOptions:
        """The same if it is an encoder (see `pools`)."""
        return self._joined([entry.encoder_options for entry in self.entries], is_encoder=True)

    def _joined(self, options: Sequence[ServeOptions], *, is_encoder: bool) -> ServeOptions:
        lengths = [one.engine.max_model_len for one in options]
        longest = None if None in lengths else max(filter(None, lengths))
        if longest == lengths[0]:
            return options[0]
        return self.entries[0].options_with({"max_model_len": longest}, is_encoder=is_encoder)


def group_into_units(entries: Iterable[ModelEntry]) -> list[UnitSpec]:
    """The units of these entries, in the order of their first ones. Entries with an error are in none."""
    by_file: dict[str, list[list[ModelEntry]]] = {}
    for entry in entries:
        if entry.error is not None:
            continue
        # What has a file for itself is in a unit for itself, so options are compared only for others.
        groups = by_file.setdefault(_file_of(entry.where), [])
        same = next((group for group in groups if _share_an_engine(group[0], entry)), None)
        if same is None:
            groups.append([entry])
        else:
            same.append(entry)
    return [UnitSpec(group) for groups in by_file.values() for group in groups]


def _file_of(where: str) -> str:
    path = os.path.expanduser(where)
    return os.path.realpath(path) if os.path.exists(path) else where


def _share_an_engine(one: ModelEntry, other: ModelEntry) -> bool:
    pairs = ((one.options, other.options), (one.encoder_options, other.encoder_options))
    return all(_loaded_as(first) == _loaded_as(second) for first, second in pairs)


def _loaded_as(options: ServeOptions) -> tuple[object, object]:
    return replace(options.engine, model="", max_model_len=None), options.encoders


class NotServedError(ApiError):
    """A name that no model has: a 404 that tells near names."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        near = [shortened(one) for one in near_names(name, served)]
        if near:
            said = f"did you mean {' or '.join(near)}?"
        else:
            more = f" and {len(served) - _MAX_NAMED} more (GET /v1/models)" if len(served) > _MAX_NAMED else ""
            listed = ", ".join(shortened(one) for one in served[:_MAX_NAMED])
            said = f"served: {listed}{more}" if served else "there are no models here yet"
        message = f"the model {quoted(name)} is not served here; {said}"
        super().__init__(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")


class Changes(Struct, frozen=True):
    """What a new look at the folder has changed. A model whose files were replaced is among both."""

    added: Sequence[ModelEntry]
    removed: Sequence[ModelEntry]


class Catalog:
    """All models of a server by their names, which lie on the event loop."""

    def __init__(self, options: ServeOptions) -> None:
        """Look into the folder, which blocks. Raises ModelError if it cannot be read."""
        self._options = options
        self.folder = options.hosting.models_dir
        """The folder that models are looked for in."""
        self._accepts_any = options.app.skip_model_name_validation
        self._found: dict[str, FoundModel] = {}
        self._entries: dict[str, ModelEntry] = {}
        self._named: dict[str, ModelEntry] = {}  # by all names but those of `_entries`
        self._loaded_adapters: dict[str, ModelEntry] = {}
        self._sections = {section.name: section for section in options.models}
        self._added: dict[str, ModelSection] = {}
        self._take(self._look())

    @property
    def entries(self) -> list[ModelEntry]:
        """All models: first those that were named, in their order, then those of the folder, and what was added."""
        return [*self._entries.values()]

    @property
    def default(self) -> ModelEntry | None:
        """The model of requests that name none: the first that can be served."""
        usable = (entry for entry in self._entries.values() if entry.error is None)
        return next(usable, next(iter(self._entries.values()), None))

    def find(self, name: str | None) -> ModelEntry:
        """The model that a request means: by a name, an alias, where it is, or the name of one of its adapters.

        None is the default. Raises NotServedError.
        """
        entry = self.default if name is None else self._find(name) or self._find(name.removesuffix(_LATEST))
        if entry is None and self._accepts_any:
            entry = self.default
        if entry is None:
            raise NotServedError(name or "", [*self._entries, *self._named])
        return entry

    def knows(self, name: str) -> bool:
        """Whether a model has that name, or one of its adapters."""
        return self._find(name) is not None

    def _find(self, name: str) -> ModelEntry | None:
        named = self._entries.get(name) or self._named.get(name) or self._loaded_adapters.get(name)
        return named or next((entry for entry in self._entries.values() if entry.finds_adapter(name)), None)

    def know_adapter(self, name: str, entry: ModelEntry) -> bool:
        """Note that a client loads an adapter of a model; whether it is new. Raises what `check_adapter` raises."""
        self.check_adapter(name, entry)
        is_new = self._find(name) is None
        self._loaded_adapters[name] = entry
        return is_new

    def check_adapter(self, name: str, entry: ModelEntry) -> None:
        """Raises ModelError if an adapter of a model cannot have that name, because it is taken."""
        if self._find(name) not in (None, entry) or name in self._entries:
            raise ModelError(f"{quoted(name)} names a model already: give the adapter another name")

    def forget_adapter(self, name: str) -> None:
        """Forget an adapter that a client has unloaded."""
        self._loaded_adapters.pop(name, None)

    def add(self, section: ModelSection) -> ModelEntry:
        """Add a model, until the server ends. Raises ModelError if its name cannot be used, or is taken."""
        for name in (section.name, *section.aliases):
            if wrong := wrong_name(name):
                raise ModelError(f"the name of a model {wrong}, got {quoted(name)}")
            if self._find(name) is not None:
                raise ModelError(f"{quoted(name)} names a model already")
        if len(self._entries) >= MAX_MODELS:
            raise ModelError(f"there are {MAX_MODELS} models already: delete one first")
        self._added[section.name] = section
        self._take(self._found)
        return self._entries[section.name]

    def copy(self, source: str, name: str) -> ModelEntry:
        """Add a model that is another one under a new name, and shares its unit. Raises what `find` and `add` raise."""
        entry = self.find(source)
        return self.add(ModelSection(name=name, where=entry.where, given=entry.section.given))

    def remove(self, name: str) -> ModelEntry:
        """Forget a model; no file is deleted. Raises NotServedError for what is no model's first name.

        A model of the folder comes back with the next look at it if it is still there.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise NotServedError(name, [*self._entries])
        self._sections.pop(name, None)
        self._added.pop(name, None)
        self._found = {key: one for key, one in self._found.items() if key != name}
        self._loaded_adapters = {key: one for key, one in self._loaded_adapters.items() if one is not entry}
        self._take(self._found)
        return entry

    async def rescan(self) -> Changes:
        """Look at the folder again, in a thread. Raises ModelError if it cannot be read; then nothing has changed."""
        found = await asyncio.to_thread(self._look)
        before = dict(self._entries)
        self._take(found)
        return Changes(
            added=[entry for name, entry in self._entries.items() if before.get(name) is not entry],
            removed=[entry for name, entry in before.items() if self._entries.get(name) is not entry],
        )

    def _look(self) -> dict[str, FoundModel]:
        return {} if self.folder is None else {one.name: one for one in models_in_folder(self.folder)}

    def _take(self, found: Mapping[str, FoundModel]) -> None:
        """Make the entries anew. One that is as before, with the files that it had, stays the same object."""
        entries = {name: self._named_entry(section, found.get(name)) for name, section in self._sections.items()}
        named = {alias: entry for entry in entries.values() for alias in entry.aliases}
        for name, model in found.items():
            before = self._found.get(name)
            if model.note is not None and (before is None or before.note != model.note):
                logger.warning("%s: %s", name, model.note)
            if name in named:
                logger.warning("%s is not served as %s, which is an alias of %s", model.where, name, named[name].name)
            elif name not in entries and name not in self._added:
                # What the operator gives for all models comes before what the folder says.
                given = {option: self._options.given.get(option, value) for option, value in model.given.items()}
                section = ModelSection(name=name, where=model.where, given=given)
                entries[name] = self._entry(section, model.where, model.error, model.fingerprint, is_found=True)
        entries |= {name: self._named_entry(section, None) for name, section in self._added.items()}
        for entry in entries.values():
            for adapter in entry.adapters:
                named.setdefault(adapter, entry)
        self._found, self._entries, self._named = dict(found), entries, named

    def _named_entry(self, section: ModelSection, found: FoundModel | None) -> ModelEntry:
        if section.where is not None:
            return self._entry(section, section.where, None, ())
        if found is None:
            where = "no --models-dir is given" if self.folder is None else f"{self.folder} has no model of this name"
            return self._entry(section, "", f"its section does not say where it is with model: and {where}", ())
        section = structs.replace(section, given={**found.given, **section.given})
        return self._entry(section, found.where, found.error, found.fingerprint)

    def _entry(
        self,
        section: ModelSection,
        where: str,
        error: str | None,
        fingerprint: tuple[int, ...],
        *,
        is_found: bool = False,
    ) -> ModelEntry:
        before = self._entries.get(section.name)
        if before is not None and (before.section, before.where, before.error, before.fingerprint) == (
            section,
            where,
            error,
            fingerprint,
        ):
            return before
        return ModelEntry(self._options, section, where, error=error, fingerprint=fingerprint, is_found=is_found)
