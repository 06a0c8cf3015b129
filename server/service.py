"""The server of a loaded model."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from starlette.applications import Starlette

from tidewheel.engine.core.engine import Engine
from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.loading.load import EngineLoad

from .app import build_app, template_of
from .app_resources import AppResources
from .http.event_loop import choose_loop
from .http.server import Server
from .model_engines import ModelEngines
from .options.serve import ServeOptions
from .server_of import server_of


def build_engine_and_app(
    load: EngineLoad, encoder_engine: EncoderEngine, options: ServeOptions, resources: AppResources
) -> tuple[Engine, Starlette]:
    """The engine of a model, when it is loaded, and the application that serves it.

    Raises TidewheelError if it cannot be served as the options say.
    """
    # What needs no weights is done while they are loaded.
    template = template_of(load.tokenizer, options.app, resources)
    engine = load.engine()
    app = build_app(
        engine,
        options.app,
        encoder_engine,
        resources=resources,
        read_template=template,
        media=options.engine.media,
        shown_options=options.shown,
    )
    return engine, app


def build_server(
    load: EngineLoad,
    encoder_engine: EncoderEngine | None,
    options: ServeOptions,
    resources: AppResources,
    tls: Callable[[], ssl.SSLContext] | None,
) -> tuple[Server, Engine]:
    """The server of a model, when it is loaded, and its engine.

    Raises TidewheelError if it cannot be served as the options say.
    """
    encoder_engine = encoder_engine or EncoderEngine()
    loop = choose_loop()
    engine, app = build_engine_and_app(load, encoder_engine, options, resources)
    return server_of(app, ModelEngines(engine, encoder_engine), loop, options, resources, tls), engine
