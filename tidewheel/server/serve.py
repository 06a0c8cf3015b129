"""What serves: the application in uvicorn, which on SIGTERM lets running answers finish."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator

import uvicorn

from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.engine import Engine
from tidewheel.engine.launch import EngineLoad
from tidewheel.server.app import build_app
from tidewheel.server.app_options import AppOptions
from tidewheel.server.options import ServerOptions

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ERROR_FRAMES_S = 5.0  # after the time-out, for aborted answers to say so to their clients
_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, or they would send into closed ones


def build_server(
    load: EngineLoad, encoder_engine: EncoderEngine | None, app_options: AppOptions, options: ServerOptions
) -> Server:
    """The server of a model, when it is loaded. Raises TidewheelError if it cannot be served as the options say."""
    encoder_engine = encoder_engine or EncoderEngine()
    engine = load.engine()
    config = uvicorn.Config(
        build_app(engine, app_options, encoder_engine),
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=not options.disable_access_log,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        server_header=False,
    )
    return Server(config, engine, encoder_engine, options.shutdown_timeout)


class Server(uvicorn.Server):
    """uvicorn's server, which on SIGTERM drains the engines while uvicorn waits for the connections."""

    def __init__(
        self, config: uvicorn.Config, engine: Engine, encoder_engine: EncoderEngine, shutdown_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._encoder_engine = encoder_engine
        self._shutdown_timeout_s = shutdown_timeout_s
        config.timeout_graceful_shutdown = int(shutdown_timeout_s + _ERROR_FRAMES_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        engines = (self._engine, self._encoder_engine)
        drains = [asyncio.create_task(engine.drain(self._shutdown_timeout_s)) for engine in engines]
        await super().shutdown(sockets)
        for drain in drains:
            drain.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn's own raises the signal again in the end; here a drained server has ended well, with exit code 0.
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
