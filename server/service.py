"""The server of a loaded model: its application in uvicorn, with limits on connections."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import uvicorn
from starlette.applications import Starlette

from tidewheel.engine.core.engine import Engine
from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.loading.load import EngineLoad

from .app import build_app, template_of
from .app_resources import AppResources
from .http.connections import connection_class
from .http.event_loop import choose_loop
from .http.server import Server
from .options.serve import ServeOptions

_BACKLOG = 2048


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
) -> Server:
    """The server of a model, when it is loaded. Raises TidewheelError if it cannot be served as the options say."""
    encoder_engine = encoder_engine or EncoderEngine()
    loop = choose_loop()
    engine, app = build_engine_and_app(load, encoder_engine, options, resources)
    config = uvicorn.Config(
        app,
        loop=loop,
        http=connection_class(options.http.limits, direct_write=not resources.middleware),
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,  # the application's own names the request
        backlog=_BACKLOG,
        timeout_keep_alive=options.http.keep_alive_timeout_s,
        server_header=False,
    )
    config.load()
    return Server(config, engine, encoder_engine, options.http.shutdown_timeout, tls)
