"""The server of an application: uvicorn, with limits on connections."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import uvicorn
from starlette.applications import Starlette

from .app_resources import AppResources
from .http.connections import connection_class
from .http.server import Server
from .options.serve import ServeOptions

if TYPE_CHECKING:
    from tidewheel.engine.core.engine import Engine
    from tidewheel.engine.encoders.engine import EncoderEngine

_BACKLOG = 2048


def server_of(
    app: Starlette,
    engine: Engine | None,
    encoder_engine: EncoderEngine,
    loop: Literal["uvloop", "asyncio"],
    options: ServeOptions,
    resources: AppResources,
    tls: Callable[[], ssl.SSLContext] | None,
) -> Server:
    """The server of an application that these engines answer for. Without a chat model `engine` is None."""
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
