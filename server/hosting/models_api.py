"""llama.cpp's endpoints for several models: which there are and how they do, loading, unloading, downloads, events."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel import __version__
from tidewheel.engine.errors import ModelError, TidewheelError, quoted
from tidewheel.engine.hosting.units import UnitBusyError

from ..api.body import whole_body
from ..api.json_response import HOLE, JsonParts, filled, json_response, listed
from ..errors import ApiError, bad_request
from ..http.rights import require_administrator
from ..openapi.document import operation
from ..protocol.decode import BodyDecoder, ParameterNotes
from ..protocol.router import ModelEvent, ModelRequest, RouterModels, RouterProps, Success, UnloadRequest
from .cards import RouterCards
from .hosted_models import HostedModels
from .management import Management, required
from .model_events import ModelEvents
from .streamed import Streamed

logger = logging.getLogger(__name__)

_NAME = {"model": "qwen"}


class ModelsEndpoints:
    """Tells of the models, and loads and unloads them."""

    def __init__(
        self,
        models: HostedModels,
        cards: RouterCards,
        events: ModelEvents,
        management: Management | None,
        notes: ParameterNotes,
    ) -> None:
        self._models = models
        self._cards = cards
        self._events = events
        self._management = management
        self._loads: set[asyncio.Task[None]] = set()
        self._decode = BodyDecoder(ModelRequest, notes=notes)
        self._decode_unload = BodyDecoder(UnloadRequest, notes=notes)

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/models", self._list),
            Route("/models", self._download, methods=["POST"]),
            Route("/models", self._delete, methods=["DELETE"]),
            Route("/models/load", self._load, methods=["POST"]),
            Route("/models/unload", self._unload, methods=["POST"]),
            Route("/models/sse", self._sse),
            Route("/props", self._props),
        ]

    @operation("List all models with their states, in llama.cpp's shapes", response=RouterModels)
    async def _list(self, request: Request) -> Response:
        if request.query_params.get("reload", "0") not in ("", "0", "false"):
            require_administrator()
            for entry in (await self._models.rescan()).removed:
                self._events.removed(entry.name)
            self._events.reloaded()
        return JsonParts(filled(RouterModels(data=HOLE), listed(self._cards.all())))

    @operation("Load a model in the background", ModelRequest, Success, example=_NAME, waits=False)
    async def _load(self, request: Request) -> Response:
        body = self._decode(await whole_body(request))
        entry = self._models.find(body.model)
        if not self._models.is_ready(entry):
            task = asyncio.create_task(self._load_unit(self._models.unit(entry).name))
            self._loads.add(task)
            task.add_done_callback(self._loads.discard)
        return json_response(Success())

    @operation(
        "Unload a model, or end its download",
        UnloadRequest,
        Success,
        example=_NAME,
        waits=False,
        administers=True,
    )
    async def _unload(self, request: Request) -> Response:
        require_administrator()
        body = self._decode_unload(await whole_body(request))
        if self._management is not None and await self._management.pulls.cancel(body.model):
            return json_response(Success())
        entry = self._models.find(body.model)
        try:
            await self._models.host.unload(self._models.unit(entry).name, wait=bool(body.wait))
        except UnitBusyError as error:
            raise ApiError(
                HTTPStatus.CONFLICT, f'{error}, or send "wait": true', param="model", code="model_busy"
            ) from error
        return json_response(Success())

    @operation("Download a model of the hub in the background", ModelRequest, Success, example=_NAME, administers=True)
    async def _download(self, request: Request) -> Response:
        management = required(self._management)
        body = self._decode(await whole_body(request))
        try:
            await management.pulls.start(body.model)
        except ModelError as error:
            raise bad_request(str(error), "model") from error
        return json_response(Success())

    @operation("Delete a downloaded model, which ?model= names", response=Success, administers=True)
    async def _delete(self, request: Request) -> Response:
        management = required(self._management)
        name = request.query_params.get("model")
        if not name:
            raise bad_request("name the model to delete: /models?model=NAME", "model")
        await management.delete(name)
        return json_response(Success())

    @operation("Events of models, as they happen", response=ModelEvent, media_type="text/event-stream")
    async def _sse(self, request: Request) -> Response:
        return Streamed(self._events.stream(), b"text/event-stream; charset=utf-8", ApiError.event)

    @operation("What the server says of itself to clients of llama.cpp", response=RouterProps)
    async def _props(self, request: Request) -> Response:
        return json_response(
            RouterProps(max_instances=self._models.max_loaded or 0, build_info=f"tidewheel {__version__}")
        )

    async def _load_unit(self, name: str) -> None:
        try:
            await self._models.host.load(name)
        except TidewheelError as error:
            logger.info("%s was not loaded: %s", quoted(name), error)
