"""The server of encoders without a chat model. It imports nothing that only chats need."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from tidewheel.engine.encoders.engine import EncoderEngine

from .app_resources import AppResources
from .encoder_app import build_encoder_app
from .http.event_loop import choose_loop
from .http.server import Server
from .model_engines import ModelEngines
from .options.serve import ServeOptions
from .server_of import server_of


def build_encoder_server(
    load: Callable[[], EncoderEngine],
    options: ServeOptions,
    resources: AppResources,
    tls: Callable[[], ssl.SSLContext] | None,
) -> tuple[Server, EncoderEngine]:
    """The server of encoders, which `load` gives. Raises TidewheelError if they cannot be served."""
    loop = choose_loop()
    encoders = load()
    app = build_encoder_app(encoders, options.app, resources=resources, shown_options=options.shown)
    return server_of(app, ModelEngines(None, encoders), loop, options, resources, tls), encoders
