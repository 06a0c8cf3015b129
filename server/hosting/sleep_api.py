"""vLLM's `/sleep`, `/wake_up` and `/is_sleeping`: models leave the memory, and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.hosting.units import State

from ..api.json_response import json_response
from ..api.one_model import IsSleeping
from ..errors import bad_request
from ..http.rights import require_administrator
from ..openapi.document import operation
from .hosted_models import HostedModels

_TAGS = frozenset({"weights", "kv_cache"})


class SleepEndpoints:
    """All models together, or the one that `?model=` names. A request for a model wakes it too."""

    def __init__(self, models: HostedModels) -> None:
        self._models = models
        self._asleep: set[str] = set()  # the units that /sleep has unloaded

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/sleep", self._sleep, methods=["POST"]),
            Route("/wake_up", self._wake_up, methods=["POST"]),
            Route("/is_sleeping", self._is_sleeping),
        ]

    @operation("Unload models, when their running requests are done", administers=True)
    async def _sleep(self, request: Request) -> Response:
        require_administrator()
        level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "wait")
        if level not in ("1", "2"):
            raise bad_request(
                "level must be 1 or 2, which both unload the models: there is no level that only pauses them", "level"
            )
        if mode != "wait":
            raise bad_request("mode must be wait: running requests are never aborted for it", "mode")
        loaded = [name for name in self._units(request) if self._state(name) in (State.LOADED, State.LOADING)]
        self._asleep |= {*loaded}
        await asyncio.gather(*(self._models.host.unload(name, wait=True) for name in loaded))
        return Response()

    @operation("Load what /sleep has unloaded", administers=True)
    async def _wake_up(self, request: Request) -> Response:
        require_administrator()
        if unknown := {*request.query_params.getlist("tags")} - _TAGS:
            raise bad_request(f"there are the tags weights and kv_cache, and no {', '.join(sorted(unknown))}", "tags")
        names = {*self._units(request)} & self._asleep
        for entry in self._models.catalog.entries:
            if entry.name in names:  # a unit has the name of one of its entries
                async with self._models.lease(entry):
                    self._asleep.discard(entry.name)
        return Response()

    @operation("Whether no model is loaded", response=IsSleeping)
    async def _is_sleeping(self, request: Request) -> Response:
        awake = any(self._state(name) in (State.LOADED, State.LOADING) for name in self._units(request))
        return json_response(IsSleeping(is_sleeping=not awake))

    def _units(self, request: Request) -> Sequence[str]:
        if name := request.query_params.get("model"):
            return [self._models.unit(self._models.find(name)).name]
        return [status.name for status in self._models.host.snapshot()]

    def _state(self, unit: str) -> State:
        return self._models.host.status(unit).state
