"""The application of a server of several models: its own endpoints, and those that a model answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette

from ..api.stored_responses import StoredResponsesEndpoints
from ..app_frame import app_of
from ..app_options import AppOptions
from ..app_resources import AppResources
from ..lifespan import lifespan_of
from ..protocol.decode import ParameterNotes
from ..responses.store import Responses
from .dispatch import Dispatcher
from .doors import Doors
from .hosted_models import HostedModels
from .managed_folder import ManagedFolder
from .model_routes import model_routes
from .status_routes import StatusEndpoints

if TYPE_CHECKING:
    from ..api.batches import Batches


def build_host_app(
    models: HostedModels,
    options: AppOptions,
    resources: AppResources,
    responses: Responses,
    batch_rows: int,
    shown_options: Mapping[str, Any],
    managed: ManagedFolder | None = None,
) -> Starlette:
    """The application. Its lifespan loads what is to be loaded at the start, and unloads everything at the end.

    `options` are the server's own: who may use it, and what of it is served. `batch_rows` requests of a
    batch run at a time. `shown_options` are for `/server_info`. Clients may change which models there are in a
    `managed` folder.
    """
    doors = Doors(models, ParameterNotes(options.unknown_parameters), managed)
    models.on_drain = doors.drain

    batches: Batches | None = None
    if options.batch_dir is not None:
        from .batches import HostBatches  # which few servers need

        notes = ParameterNotes(options.unknown_parameters)
        batches = HostBatches(models, options.batch_dir, batch_rows, notes, resources.keys.tenant_of)

    async def close() -> None:
        await responses.close()
        await resources.close()

    dispatcher = Dispatcher(models)
    routes = [
        *StoredResponsesEndpoints(responses).routes(),
        *(() if batches is None else batches.routes),
        *StatusEndpoints(models, options.metrics_prefix, shown_options).routes(),
        *doors.routes,
        *model_routes(
            dispatcher.answer,
            dispatcher.answer_of_encoder,
            shows_tokenizer=options.enable_tokenizer_info_endpoint,
        ),
    ]
    return app_of(
        routes, options, resources, lifespan_of(models, batches, close), max_values=models.max_values, has_images=True
    )
