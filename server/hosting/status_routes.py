"""What a server of several models tells of itself and of them: health, which models there are, how busy they are."""

from __future__ import annotations

import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidewheel.engine.errors import quoted

from ..api.health import health_routes
from ..api.json_response import json_response
from ..api.metrics import metrics_routes
from ..api.operations import Load, encoder_load_of, load_of, shown_to_tenant
from ..errors import ApiError
from ..model_cards import root_of
from ..openapi.document import operation
from ..protocol.hosted_models import HostedModelCard, HostedModelList, HostHealth, HostInfo, ModelStatus
from ..telemetry.host_metrics import HostMetrics
from .catalog import ModelEntry
from .hosted_models import HostedModels
from .merged_metrics import MergedMetrics
from .unit import LoadedModel


class StatusEndpoints:
    """Tells of the models without loading any. With `?model=`, a loaded model tells of itself."""

    def __init__(self, models: HostedModels, metrics_prefix: str, options: Mapping[str, Any]) -> None:
        """`options` are what `/server_info` shows of the command line."""
        self._prefix = metrics_prefix
        self._models = models
        self._options = options
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """The endpoints."""
        of_all, of_keys = (MergedMetrics(self._models, self._prefix, named=named) for named in (False, True))
        return [
            Route("/v1/models", self._list),
            Route("/v1/models/{name:path}", self._retrieve),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            *(route for route in health_routes() if route.path == "/version"),
            Route("/load", self._load),
            Route("/server_info", self._server_info),
            *metrics_routes(of_all, HostMetrics(self._models.host, self._models.budget, self._prefix), named=[of_keys]),
        ]

    @operation("List the served models and their state", response=HostedModelList)
    async def _list(self, request: Request) -> Response:
        cards = [card for entry in self._models.catalog.entries for card in await self._cards(entry)]
        return json_response(HostedModelList(data=cards))

    @operation("One served model and its state", response=HostedModelCard)
    async def _retrieve(self, request: Request) -> Response:
        name = request.path_params["name"]
        entry = await self._models.find_asked(name)
        cards = await self._cards(entry)
        return json_response(next((card for card in cards if card.id == name), cards[0]))

    @operation("Whether the server serves, and which models are ready", response=HostHealth)
    async def _health(self, request: Request) -> Response:
        if (one := self._one(request)) is not None:
            return one
        entries = [entry for entry in self._models.catalog.entries if self._loaded(entry) is not None]
        return json_response(HostHealth(ready=[entry.name for entry in entries]))

    @operation("How busy the loaded models are, together; `kv_cache_usage` is that of the fullest", response=Load)
    async def _load(self, request: Request) -> Response:
        if (one := self._one(request)) is not None:
            return one
        total = Load(0, 0, 0, 0.0)
        for engines in (model.engines for model in self._models.loaded):
            load = encoder_load_of(engines.encoders) if engines.chat is None else load_of(engines.chat)
            total.server_load += load.server_load
            total.running += load.running
            total.waiting += load.waiting
            total.kv_cache_usage = max(total.kv_cache_usage, load.kv_cache_usage)
        return json_response(total)

    @operation("Which models there are, and the server's options", response=HostInfo)
    async def _server_info(self, request: Request) -> Response:
        if (one := self._one(request)) is not None:
            return one
        return json_response(
            HostInfo(
                models={entry.name: self._status(entry).value for entry in self._models.catalog.entries},
                memory_bytes=self._models.budget.total_bytes,
                memory_used_bytes=self._models.budget.used_bytes,
                options=shown_to_tenant(self._options),
            )
        )

    async def _cards(self, entry: ModelEntry) -> list[HostedModelCard]:
        """The cards of an entry: for each of its names, and for its adapters if it is loaded."""
        status, size = self._status(entry), self._size(entry)
        if (loaded := self._loaded(entry)) is not None:
            await loaded.models[entry.name].models.refresh()
            cards = loaded.models[entry.name].models.cards
            return [HostedModelCard(**structs.asdict(card), size=size, status=status) for card in cards]

        def card(name: str, length: int | None = None, parent: str | None = None) -> HostedModelCard:
            root = root_of(entry.where, entry.name) if parent is None else name
            return HostedModelCard(
                id=name,
                created=self._created,
                root=root,
                parent=parent,
                max_model_len=length,
                size=size,
                status=status,
            )

        own = [card(name, entry.max_model_len) for name in (entry.name, *entry.aliases)]
        return [*own, *(card(name, parent=entry.name) for name in entry.adapters)]

    def _status(self, entry: ModelEntry) -> ModelStatus:
        if entry.error is not None:
            return ModelStatus(value="failed", error=entry.error)
        status = self._models.status(entry)
        progress = None if status.progress is None else status.progress.fraction
        return ModelStatus(value=status.state.value, progress=progress, error=status.error)

    def _size(self, entry: ModelEntry) -> int | None:
        needs = None if entry.error is not None else self._models.status(entry).needs
        return entry.file_bytes if needs is None else needs.total_bytes

    def _loaded(self, entry: ModelEntry) -> LoadedModel | None:
        return None if entry.error is not None else self._models.unit(entry).loaded

    def _one(self, request: Request) -> Response | None:
        """What the model of a query says of itself; None without one. Raises ApiError, 503 if it is not loaded."""
        if (name := request.query_params.get("model")) is None:
            return None
        entry = self._models.catalog.find(name)
        if (loaded := self._loaded(entry)) is None:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the model {quoted(entry.name)} is {self._status(entry).value}: a request to it loads it",
                param="model",
                code="model_not_loaded",
            )
        return _OfOne(loaded, entry)


class _OfOne(Response):
    """What a loaded model answers itself."""

    def __init__(self, loaded: LoadedModel, entry: ModelEntry) -> None:
        super().__init__()
        self._app = loaded.app(entry.name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
