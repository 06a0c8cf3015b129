"""The server: the application in uvicorn. SIGTERM lets running answers finish, and a second SIGTERM ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Generator
from functools import partial
from types import FrameType
from typing import Protocol, cast

import uvicorn

from tidewheel.engine.errors import TidewheelError

from .acceptor import Acceptor

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one from a terminal that is closed
_ERROR_FRAMES_S = 5.0  # after the time-out, to send error events to clients of aborted answers
_ABORT_S = 1.0  # for handlers to notice that their connections were aborted
_WARM_UP_TICK = 5  # ticks of uvicorn, 0.1 s each: clients that waited for the start are answered first
_INTERRUPTED = 130  # the exit code of a program that Ctrl-C has ended


class Engines(Protocol):
    """What computes the answers, as a server needs to know it."""

    @property
    def failure(self) -> BaseException | None:
        """An error after which the server cannot go on."""

    @property
    def is_alive(self) -> bool:
        """Whether an engine's thread runs."""

    @property
    def has_stalled(self) -> bool:
        """Whether a step took longer than --step-timeout."""

    def warm_up(self) -> None:
        """Prepare for what requests may ask for, unless some are there."""

    async def drain(self, timeout_s: float, /) -> None:
        """Refuse new requests and wait for those that run; after `timeout_s` abort the rest."""


class Server(uvicorn.Server):
    """uvicorn's server. On SIGTERM or Ctrl-C it drains the engines, while uvicorn waits for the connections.

    A second signal ends running answers at once and sends error events to their clients. A third one does not wait for
    these either. If an engine fails, the server ends by itself after it has sent error events to all clients.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engines: Engines,
        shutdown_timeout_s: float,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`tls` gives the context of each new connection."""
        super().__init__(config)
        self._tls = tls
        self._engines = engines
        self._shutdown_timeout_s = shutdown_timeout_s
        self._acceptors: list[Acceptor] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurry = asyncio.Event()
        config.timeout_graceful_shutdown = None  # `_end_answers` ends the wait

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended an engine, if one has."""
        return self._engines.failure

    async def on_tick(self, counter: int) -> bool:
        if counter >= _WARM_UP_TICK:
            self._engines.warm_up()
        return await super().on_tick(counter) or self.failure is not None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup([])  # uvicorn's own would take connections until no file can be opened

        make_protocol = partial(
            cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        connections = self.server_state.connections
        for listener in sockets or ():
            acceptor = Acceptor(listener, make_protocol, self._tls, self.config.backlog, connections)
            self._acceptors.append(acceptor)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        ending = asyncio.create_task(self._end_answers(0 if self.failure is not None else self._shutdown_timeout_s))
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_answers(self, timeout_s: float) -> None:
        """Drain the engines. Soon after, drop clients that have not read the end of their answer."""
        drains = [asyncio.create_task(self._engines.drain(self._shutdown_timeout_s))]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), timeout_s)
            drains.append(asyncio.create_task(self._engines.drain(0)))
        await asyncio.sleep(_ERROR_FRAMES_S)
        for drain in drains:
            drain.cancel()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(_ABORT_S)
        for task in list(self.server_state.tasks):
            task.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGHUP and self.should_exit:
            return  # a shell and its terminal may both send one
        if self._hurry.is_set():
            self.force_exit = True
        elif self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._hurry.set)
        self.should_exit = True

    def end(self) -> int:
        """The exit code after `run`. Raises TidewheelError if an engine has failed.

        If an engine thread is still running, in a step or after a second Ctrl-C, the process exits here. Otherwise the
        interpreter would shut down under the thread.
        """
        if self._engines.is_alive:
            has_stalled = self._engines.has_stalled
            logging.shutdown()
            os._exit(_INTERRUPTED if self.force_exit else int(has_stalled))
        if self.failure is not None:
            raise TidewheelError(f"the engine has failed: {self.failure}")
        return 0

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        # uvicorn's own raises the signal again in the end; here a drained server has ended well, with exit code 0.
        heeded = [number for number in _SIGNALS if not _is_for_nobody(number)]
        before = {number: signal.signal(number, self.handle_exit) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _is_for_nobody(number: signal.Signals) -> bool:
    """Whether the process was started to go on when its terminal is closed, as nohup does."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
