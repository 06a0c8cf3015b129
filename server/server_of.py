"""The server of an application: uvicorn, with limits on connections."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Literal

import uvicorn
from starlette.applications import Starlette

from .app_resources import AppResources
from .http.connections import connection_class
from .http.server import Engines, Server
from .options.serve import ServeOptions

_BACKLOG = 2048


def server_of(
    app: Starlette,
    engines: Engines,
    loop: Literal["uvloop", "asyncio"],
    options: ServeOptions,
    resources: AppResources,
    tls: Callable[[], ssl.SSLContext] | None,
) -> Server:
    """The server of an application that these engines answer for."""
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
    return Server(config, engines, options.http.shutdown_timeout, tls)
