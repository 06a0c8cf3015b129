"""Doors: the endpoints that load, unload and manage models, under the names that other servers have for them."""

from __future__ import annotations

from starlette.routing import Route

from ..protocol.decode import ParameterNotes
from .cards import RouterCards
from .hosted_models import HostedModels
from .managed_folder import ManagedFolder
from .management import Management
from .model_events import ModelEvents
from .models_api import ModelsEndpoints
from .ollama_api import HostedOllamaEndpoints
from .sleep_api import SleepEndpoints


class Doors:
    """llama.cpp's, Ollama's and vLLM's endpoints for a server's models."""

    def __init__(self, models: HostedModels, notes: ParameterNotes, managed: ManagedFolder | None) -> None:
        """With a `managed` folder of models, administrators may change which models there are."""
        events = ModelEvents(models)
        self._events = events
        self._management = None if managed is None else Management(models, managed, events.pulled, events.removed)
        cards = RouterCards(models, self._management)
        self.routes: list[Route] = [
            *ModelsEndpoints(models, cards, events, self._management, notes).routes(),
            *HostedOllamaEndpoints(models, cards, self._management, notes).routes(),
            *SleepEndpoints(models).routes(),
        ]

    async def drain(self) -> None:
        """End what would go on for long: streams of events, and downloads."""
        self._events.end()
        if self._management is not None:
            await self._management.stop()
