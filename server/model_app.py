"""ModelApp: what one model answers, without the frame around it; and the application of a server that has only that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.routing import Route

from tidewheel.engine.declaring.record import record

from .api.one_model import one_model_routes
from .app_frame import app_of
from .app_options import AppOptions
from .app_resources import AppResources
from .lifespan import lifespan_of
from .model_cards import ModelCards
from .model_engines import ModelEngines
from .protocol.decode import ParameterNotes

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from .api.batches import Batches
    from .responses.store import Responses


@record(frozen=True, kw_only=True)
class ModelApp:
    """What one model answers, while its engines run.

    `routes` take requests to the model, and `status_routes` tell how it does. Metrics are of `collectors`; those of
    `named_collectors` have names that clients gave. A body may have `max_values` values in its JSON, and images where
    the model sees any. A batch may run `batch_rows` requests at a time. `close` ends its threads.
    """

    models: ModelCards
    routes: Sequence[Route]
    status_routes: Sequence[Route]
    collectors: Sequence[Collector]
    named_collectors: Sequence[Collector] = ()
    notes: ParameterNotes
    max_values: int
    has_images: bool = False
    batch_rows: int
    close: Callable[[], None]


def app_of_model(
    model: ModelApp,
    engines: ModelEngines,
    options: AppOptions,
    resources: AppResources,
    responses: Responses | None = None,
) -> Starlette:
    """The application of a server that has one model. Its lifespan starts and stops the engines."""
    batches: Batches | None = None
    if options.batch_dir is not None:
        from .api.batches import Batches  # which few servers need

        batches = Batches(options.batch_dir, model.batch_rows, model.max_values, model.notes, resources.keys.tenant_of)

    async def close() -> None:
        if responses is not None:
            await responses.close()
        model.close()
        await resources.close()

    return app_of(
        [*model.routes, *(() if batches is None else batches.routes), *model.status_routes, *one_model_routes()],
        options,
        resources,
        lifespan_of(engines, batches, close),
        max_values=model.max_values,
        has_images=model.has_images,
    )
