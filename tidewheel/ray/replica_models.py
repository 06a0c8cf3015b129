"""What a replica serves: one model that it loaded at its start, or several that it loads when requests name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from starlette.applications import Starlette

from tidewheel.engine.core.engine import Engine
from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.hosting.units import State
from tidewheel.engine.loading.load import EngineLoad
from tidewheel.server.app_resources import find_resources
from tidewheel.server.commands.serve import load_encoders_of
from tidewheel.server.options.serve import ServeOptions
from tidewheel.server.service import build_engine_and_app

from .policy import DEFAULT_MODEL
from .prefixes import model_key


class ReplicaModels(Protocol):
    """The models of a replica, and its application. Numbers are those of `model_key`."""

    app: Starlette

    @property
    def failure(self) -> BaseException | None:
        """What has ended the replica's engine."""

    def warm_up(self) -> None:
        """Prepare for what requests may ask for, unless some are there."""

    @property
    def loaded(self) -> list[int] | None:
        """The names of models that are loaded or are being loaded; None if there is a single model."""

    @property
    def engines(self) -> Iterable[Engine]:
        """The engines of chat models that are loaded."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step, or for their model."""


def models_of(options: ServeOptions) -> ReplicaModels:
    """What these options name. A single model is loaded. Raises TidewheelError."""
    return SeveralModels(options) if options.hosts else OneModel(options)


class OneModel:
    """A chat model, and encoders beside it. See ReplicaModels."""

    loaded = None

    def __init__(self, options: ServeOptions) -> None:
        resources = find_resources(options.app)
        self._encoders = load_encoders_of(options) or EncoderEngine()
        with EngineLoad(options.engine) as load:
            self._engine, self.app = build_engine_and_app(load, self._encoders, options, resources)
        self.engines = (self._engine,)

    @property
    def failure(self) -> BaseException | None:
        return self._engine.failure or self._encoders.failure

    def warm_up(self) -> None:
        self._engine.warm_up()

    @property
    def num_waiting(self) -> int:
        return self._engine.stats().num_waiting


class SeveralModels:
    """Models that are loaded when requests name them. One that fails is loaded anew. See ReplicaModels."""

    failure = None

    def __init__(self, options: ServeOptions) -> None:
        from tidewheel.server.hosting.catalog import Catalog
        from tidewheel.server.hosting.service import build_host

        self._models, self.app = build_host(options, Catalog(options), find_resources(options.app))

    def warm_up(self) -> None:
        self._models.warm_up()

    @property
    def loaded(self) -> list[int]:
        catalog, numbers = self._models.catalog, list[int]()
        default = catalog.default
        for entry in catalog.entries:
            if entry.error is None and self._models.status(entry).state in (State.LOADING, State.LOADED):
                numbers += map(model_key, (entry.name, *entry.aliases, *entry.adapters))
                if (loaded := self._models.unit(entry).loaded) is not None:  # clients may have loaded adapters
                    numbers += (model_key(card.id) for card in loaded.models[entry.name].models.cards)
                if entry is default:
                    numbers.append(DEFAULT_MODEL)
        return numbers

    @property
    def engines(self) -> Iterator[Engine]:
        engines = (model.engines.chat for model in self._models.loaded)
        return (engine for engine in engines if engine is not None)

    @property
    def num_waiting(self) -> int:
        for_models = sum(unit.waiting for unit in self._models.host.snapshot())
        return for_models + sum(engine.stats().num_waiting for engine in self.engines)
