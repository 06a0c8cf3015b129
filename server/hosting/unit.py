"""ModelUnit: the engines of one or more names, which are loaded together and share weights."""

from __future__ import annotations

import asyncio
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from starlette.routing import Router
from starlette.types import ASGIApp

from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.encoders.load import load_model_alone, needs_of_model
from tidewheel.engine.encoders.settings import pools
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.hosting.cores import SharedCores
from tidewheel.engine.hosting.units import Needs, Progress, Report
from tidewheel.engine.loading.load import EngineLoad
from tidewheel.engine.machine.memory import release_free_memory
from tidewheel.engine.text.tokenizer import Tokenizer

from ..api.aliases import aliases
from ..app import chat_engines, chat_model_app, shared_adapters_of, template_of
from ..app_resources import AppResources, resources_of_model
from ..chat.model_template import ModelTemplate
from ..encoder_app import encoder_model_app
from ..http.routes_by_path import RoutesByPath
from ..model_app import ModelApp
from ..model_engines import ModelEngines
from ..options.serve import ServeOptions
from ..responses.store import Responses

if TYPE_CHECKING:
    from .catalog import ModelEntry, UnitSpec


class LoadedModel:
    """A unit that is loaded: its engines, and what each of its names answers. See Loaded."""

    def __init__(
        self, engines: ModelEngines, models: dict[str, ModelApp], make_model: Callable[[ModelEntry], ModelApp]
    ) -> None:
        """`models` are by the names of the entries, and `make_model` makes one more. `on_close` is called when it is
        closed.
        """
        self.engines = engines
        self.models = models
        self.loaded_at = time.monotonic()
        self._make_model = make_model
        self._apps = {name: _application(model) for name, model in models.items()}
        self.on_close: Callable[[], None] = lambda: None

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended an engine, if one has."""
        return self.engines.failure

    @property
    def is_writing(self) -> bool:
        """See Loaded."""
        return self.engines.is_writing

    def app(self, name: str) -> ASGIApp:
        """What answers the requests for an entry, behind the server's own middleware."""
        return self._apps[name]

    def add(self, entry: ModelEntry) -> None:
        """Answer to one more entry, unless it does. Raises TidewheelError."""
        if entry.name not in self.models:
            self.models[entry.name] = self._make_model(entry)
            self._apps[entry.name] = _application(self.models[entry.name])

    async def close(self) -> None:
        """Stop the engines and free their memory."""
        self.on_close()
        await self.engines.stop()
        for model in self.models.values():
            model.close()


class ModelUnit:
    """A unit of a server's models, see Unit. What it has loaded is there for those who look at it without a lease."""

    def __init__(self, spec: UnitSpec, shared: Shared) -> None:
        self.spec = spec
        self.name = spec.name
        self.pinned = spec.pinned
        self.idle_s = spec.idle_s
        self.loaded: LoadedModel | None = None
        self._shared = shared
        self._planned: _Load | None = None
        self._is_encoder: bool | None = None

    def plan(self) -> Needs:
        """The memory that it will take. Blocks, and reads no weights. Raises TidewheelError."""
        kind = _EncoderLoad if self._look() else _ChatLoad
        self._planned = kind(self.spec, self._shared)
        return self._planned.needs

    def is_encoder(self) -> bool:
        """Whether it generates no text, as far as its files say. Blocks, the first time."""
        if self._is_encoder is None:
            try:
                self._look()
            except TidewheelError:
                self._is_encoder = False
        return bool(self._is_encoder)

    def _look(self) -> bool:
        options = self.spec.encoder_options
        self._is_encoder = pools(options.engine, options.encoders)
        return self._is_encoder

    async def load(self, report: Report) -> LoadedModel:
        """Load and start what was planned. If it is cancelled, all that there is of it is freed first.

        Raises TidewheelError.
        """
        assert self._planned is not None, "it is planned before each load"
        load, self._planned = self._planned, None
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "load")

        def report_there(progress: Progress) -> None:
            loop.call_soon_threadsafe(report, progress)

        load.report = report_there
        loading = loop.run_in_executor(thread, load.run)
        thread.shutdown(wait=False)
        try:
            loaded = await asyncio.shield(loading)
        except asyncio.CancelledError:
            load.cancel()
            await asyncio.wait([loading])
            if loading.exception() is None:
                await loading.result().close()
            raise
        self.loaded, loaded.on_close = loaded, self._hide
        loaded.engines.start()
        try:
            self.take(self.spec)  # which may have got names meanwhile
        except BaseException:
            await loaded.close()
            raise
        return loaded

    def fits(self, spec: UnitSpec) -> bool:
        """Whether it is the unit of that spec, which may have fewer names than its own, and more."""
        own = {entry.name: entry for entry in self.spec.entries}
        return spec.entries[0] is self.spec.entries[0] and all(
            own.get(entry.name, entry) is entry for entry in spec.entries
        )

    def take(self, spec: UnitSpec) -> None:
        """Answer to the names of a spec that fits, also if it is loaded. Raises TidewheelError."""
        self.spec, self.pinned, self.idle_s = spec, spec.pinned, spec.idle_s
        if self.loaded is not None:
            for entry in spec.entries:
                self.loaded.add(entry)

    def _hide(self) -> None:
        self.loaded = None

    def forget(self) -> None:
        """See Unit. Engines and routes refer to each other, so only a collection frees them; a vocabulary is large."""
        self._planned = None
        gc.collect()
        asyncio.get_running_loop().run_in_executor(None, release_free_memory)


class Shared(NamedTuple):
    """What the models of a server have in common. `responses` are where the responses of all are kept.

    Together they may take `memory_bytes`; None: as much as there is.
    """

    resources: AppResources
    responses: Responses
    cores: SharedCores
    memory_bytes: int | None


class _Load(ABC):
    """One load of a unit. It runs in a thread of its own, and its `report` is called there."""

    needs: Needs

    def __init__(self) -> None:
        self.report: Report = lambda progress: None

    @abstractmethod
    def run(self) -> LoadedModel:
        """The unit, loaded. Raises TidewheelError, and LoadCancelledError."""

    @abstractmethod
    def cancel(self) -> None:
        """Give it up as soon as that can be."""


class _ChatLoad(_Load):
    """A model that generates."""

    def __init__(self, spec: UnitSpec, shared: Shared) -> None:
        """Plan it. Raises TidewheelError."""
        super().__init__()
        self._spec, self._shared = spec, shared
        self._load = EngineLoad(
            spec.options.engine,
            cores=shared.cores,
            memory_bytes=shared.memory_bytes,
            report=lambda progress: self.report(progress),
        )
        self.needs = self._load.needs

    def cancel(self) -> None:
        self._load.cancel()

    def run(self) -> LoadedModel:
        options, shared = self._spec.options, self._shared
        with self._load as load:
            # What needs no weights is done while they are loaded.
            presets = [_Preset.of(entry, shared.resources, load.tokenizer) for entry in self._spec.entries]
            engine = load.engine()
        encoders = EncoderEngine()
        names = set[str]()
        adapters = shared_adapters_of(engine, shared.resources, names)

        def model_of(preset: _Preset) -> ModelApp:
            names.add(preset.name)
            return chat_model_app(
                engine,
                preset.options.app,
                encoders,
                shared.responses,
                resources=preset.resources,
                read_template=preset.template,
                media=options.engine.media,
                shown_options=preset.options.shown,
                max_model_len=preset.options.engine.max_model_len,
                shared_adapters=adapters,
            )

        return LoadedModel(
            chat_engines(engine, encoders, options.app),
            {preset.name: model_of(preset) for preset in presets},
            lambda entry: model_of(_Preset.of(entry, shared.resources, engine.tokenizer)),
        )


class _EncoderLoad(_Load):
    """An encoder."""

    def __init__(self, spec: UnitSpec, shared: Shared) -> None:
        """Plan it. Raises TidewheelError."""
        super().__init__()
        self._spec, self._shared = spec, shared
        options = spec.encoder_options
        self.needs = needs_of_model(options.engine, options.encoders)

    def cancel(self) -> None:
        """Encoders are small: what loads is loaded to its end, and closed."""

    def run(self) -> LoadedModel:
        self.report(Progress("reading"))
        options = self._spec.encoder_options
        engine = load_model_alone(
            options.engine, options.encoders, options.app.served_model_names, cores=self._shared.cores
        )

        def model_of(entry: ModelEntry) -> ModelApp:
            own = entry.encoder_options
            return encoder_model_app(engine, own.app, shown_options=own.shown)

        return LoadedModel(
            ModelEngines(None, engine), {entry.name: model_of(entry) for entry in self._spec.entries}, model_of
        )


class _Preset(NamedTuple):
    """What a name of a unit has of its own."""

    name: str
    options: ServeOptions
    resources: AppResources
    template: ModelTemplate

    @classmethod
    def of(cls, entry: ModelEntry, shared: AppResources, tokenizer: Tokenizer) -> _Preset:
        """Reads what an entry names. Raises TidewheelError."""
        options = entry.options
        resources = resources_of_model(shared, options.app)
        return cls(entry.name, options, resources, template_of(tokenizer, options.app, resources))


def _application(model: ModelApp) -> ASGIApp:
    routes = [*model.routes, *model.status_routes]
    routes += aliases(routes)
    return RoutesByPath(routes, Router(routes, redirect_slashes=False))
