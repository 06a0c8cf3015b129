"""What serves: the application in uvicorn, which on SIGTERM lets running answers finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import Generator

import uvicorn

from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.engine import Engine
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.launch import EngineLoad
from tidewheel.server.app import build_app
from tidewheel.server.app_options import AppOptions
from tidewheel.server.connections import connection_class
from tidewheel.server.event_loop import choose_loop
from tidewheel.server.limits import ConnectionLimits
from tidewheel.server.options import ServerOptions

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ERROR_FRAMES_S = 5.0  # after the time-out, for aborted answers to say so to their clients
_BACKLOG = 2048
_WARM_UP_TICK = 5  # uvicorn's, of 0.1 s: who has waited for the start comes first
_INTERRUPTED = 130  # the exit code that shells give to Ctrl-C
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, or they would send into closed ones


def build_server(
    load: EngineLoad,
    encoder_engine: EncoderEngine | None,
    app_options: AppOptions,
    options: ServerOptions,
    tls: ssl.SSLContext | None,
) -> Server:
    """The server of a model, when it is loaded. Raises TidewheelError if it cannot be served as the options say."""
    limits = ConnectionLimits(
        max_header_bytes=options.max_header_size,
        max_header_count=options.max_header_count,
        read_timeout_s=options.read_timeout,
        write_timeout_s=options.write_timeout,
    )
    encoder_engine = encoder_engine or EncoderEngine()
    engine = load.engine()
    config = uvicorn.Config(
        build_app(engine, app_options, encoder_engine),
        loop=choose_loop(),
        http=connection_class(limits, direct_write=not app_options.middleware),
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,  # the application's own names the request
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        server_header=False,
    )
    config.load()
    config.ssl = tls
    return Server(config, engine, encoder_engine, options.shutdown_timeout)


class Server(uvicorn.Server):
    """uvicorn's server, which on SIGTERM drains the engines while uvicorn waits for the connections.

    It ends by itself when one of them has failed, once the clients have been told.
    """

    def __init__(
        self, config: uvicorn.Config, engine: Engine, encoder_engine: EncoderEngine, shutdown_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._engines = (engine, encoder_engine)
        self._shutdown_timeout_s = shutdown_timeout_s
        config.timeout_graceful_shutdown = int(shutdown_timeout_s + _ERROR_FRAMES_S)

    @property
    def failure(self) -> BaseException | None:
        """What has killed an engine."""
        return next((engine.failure for engine in self._engines if engine.failure is not None), None)

    async def on_tick(self, counter: int) -> bool:
        if counter >= _WARM_UP_TICK:
            self._engines[0].warm_up()
        return await super().on_tick(counter) or self.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.failure is not None:
            self.config.timeout_graceful_shutdown = int(_ERROR_FRAMES_S)
        drains = [asyncio.create_task(engine.drain(self._shutdown_timeout_s)) for engine in self._engines]
        await super().shutdown(sockets)
        for drain in drains:
            drain.cancel()

    def end(self) -> int:
        """The exit code after `run`. Raises TidewheelError if an engine has failed.

        With an engine thread left behind, in a step or by a second Ctrl-C, the process ends here: the thread would take
        part in the interpreter's end.
        """
        engine = self._engines[0]
        if engine.is_alive:
            logging.shutdown()
            os._exit(_INTERRUPTED if self.force_exit else int(engine.stats().stalled_steps_total > 0))
        if self.failure is not None:
            raise TidewheelError(f"the engine has failed: {self.failure}")
        return 0

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn's own raises the signal again in the end; here a drained server has ended well, with exit code 0.
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
