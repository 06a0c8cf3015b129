"""The server of several models."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from starlette.applications import Starlette

from tidewheel.engine.hosting.budget import MemoryBudget
from tidewheel.engine.machine.memory import read_memory

from ..app import responses_of
from ..app_resources import AppResources
from ..http.event_loop import choose_loop
from ..http.server import Server
from ..options.serve import ServeOptions
from ..server_of import server_of
from .catalog import Catalog
from .host_app import build_host_app
from .hosted_models import HostedModels
from .managed_folder import ManagedFolder
from .management import require_separate_key


def build_host_server(
    options: ServeOptions, catalog: Catalog, resources: AppResources, tls: Callable[[], ssl.SSLContext] | None
) -> Server:
    """The server of the models in a catalog, none of which is loaded yet. Raises TidewheelError."""
    loop = choose_loop()
    models, app = build_host(options, catalog, resources)
    return server_of(app, models, loop, options, resources, tls)


def build_host(options: ServeOptions, catalog: Catalog, resources: AppResources) -> tuple[HostedModels, Starlette]:
    """The models in a catalog, none of which is loaded yet, and their application. Raises TidewheelError."""
    # Without a known amount a share is of nothing, and bounds nothing.
    budget = MemoryBudget(options.hosting.memory_bytes(read_memory().available or 0) or None)
    responses = responses_of(options.app, resources)
    managed = None
    if options.hosting.allow_model_management and options.hosting.models_dir is not None:
        require_separate_key(resources.keys, options.http)
        managed = ManagedFolder(options.hosting.models_dir)
        managed.serve_copies(catalog)
    models = HostedModels(catalog, resources, responses, budget, options.hosting.max_loaded_models)
    rows = options.engine.max_num_seqs
    app = build_host_app(models, options.app, resources, responses, rows, options.shown, managed)
    return models, app
