"""The application of a server of several models: its own endpoints, and those that a model answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette

from ..api.stored_responses import StoredResponsesEndpoints
from ..app_frame import app_of
from ..app_options import AppOptions
from ..app_resources import AppResources
from ..garbage import collect_seldom
from ..http.json_limits import MIN_VALUES
from ..responses.store import Responses
from .dispatch import Dispatcher
from .hosted_models import HostedModels
from .model_routes import model_routes
from .status_routes import StatusEndpoints


def build_host_app(
    models: HostedModels,
    options: AppOptions,
    resources: AppResources,
    responses: Responses,
    shown_options: Mapping[str, Any],
) -> Starlette:
    """The application. Its lifespan loads what is to be loaded at the start, and unloads everything at the end.

    `options` are the server's own: who may use it, and what of it is served. `shown_options` are for `/server_info`.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        models.start()
        collections = asyncio.create_task(collect_seldom())
        try:
            yield
        finally:
            collections.cancel()
            await models.stop()
            await responses.close()
            await resources.close()

    routes = [
        *StoredResponsesEndpoints(responses).routes(),
        *StatusEndpoints(models, shown_options).routes(),
        *model_routes(Dispatcher(models).answer, shows_tokenizer=options.enable_tokenizer_info_endpoint),
    ]
    return app_of(routes, options, resources, lifespan, max_values=MIN_VALUES, has_images=True)
