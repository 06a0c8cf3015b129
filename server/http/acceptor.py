"""Lets connections in while there are file descriptors for them.

An event loop accepts every connection until the process has no descriptor left. Then uvloop resets connections without
a word, asyncio's own loop logs thousands of tracebacks, and everything else that opens a file fails. This acceptor
keeps some descriptors free for the rest of the server. Idle connections make room for new clients. Those wait in the
listener's queue until others leave.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable, Collection

from .connections import Connection

logger = logging.getLogger(__name__)

_AT_ONCE = 8  # connections accepted in one go, before the event loop does something else: some milliseconds
_KEPT = 32  # descriptors kept free for everything that is not a connection; fewer if the limit is small
_RETRY_S = 0.25
_MIN_IDLE_S = 1.0  # before a connection makes room: its first request, or the next one, may be on its way
_CLOSES_S = 0.01  # by then a connection that was closed has left its descriptor
_LOG_EVERY_S = 60.0


class Acceptor:
    """Accepts connections from `listener`. `make_protocol` makes their protocols; `open_ones` are those that are open.

    `tls` gives the context of each, None is plain HTTP.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext] | None,
        backlog: int,
        open_ones: Collection[object],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._open = open_ones
        self._retry: asyncio.TimerHandle | None = None
        self._logged = float("-inf")
        self._starting: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        listener.listen(backlog)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more connections."""
        self._loop.remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # the whole system has no descriptors left, or no memory
                self._wait(error)
                return
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._start(connection))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
            if not _leaves_room(connection.fileno()):
                self._wait(made_room=self._make_room())
                return

    async def _start(self, connection: socket.socket) -> None:
        try:
            tls = None if self._tls is None else self._tls()
            await self._loop.connect_accepted_socket(self._make_protocol, connection, ssl=tls)
        except (OSError, asyncio.TimeoutError) as error:  # the client has left, or the TLS handshake failed
            logger.debug("A connection could not be established: %s", error)
            connection.close()

    def _make_room(self) -> bool:
        """Close the connections that have been idle longest; whether there were any."""
        before = self._loop.time() - _MIN_IDLE_S
        idle = [
            (since, one)
            for one in self._open
            if isinstance(one, Connection) and (since := one.idle_since) is not None and since < before
        ]
        for _, one in heapq.nsmallest(_AT_ONCE, idle, key=lambda pair: pair[0]):
            one.close_idle()
        return bool(idle)

    def _wait(self, error: OSError | None = None, *, made_room: bool = False) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(_CLOSES_S if made_room else _RETRY_S, self._go_on)
        now = time.monotonic()
        if made_room:
            return
        if now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            logger.error(
                "No file descriptors are left for connections: %d are open, new ones have to wait; the limit is %s "
                "files (ulimit -n, or systemd's LimitNOFILE)%s",
                len(self._open) + len(self._starting),
                _max_files(),
                "" if error is None else f": {error}",
            )

    def _go_on(self) -> None:
        self._retry = None
        try:
            free = os.dup(self._listener.fileno())
            os.close(free)
        except OSError as error:
            self._wait(error)
            return
        if _leaves_room(free):
            self._loop.add_reader(self._listener.fileno(), self._accept)
        else:
            self._wait(made_room=self._make_room())


def _leaves_room(descriptor: int) -> bool:
    """Whether descriptors are free beside those that are kept, when this one was the lowest that the system had."""
    most = _max_files()  # read each time: it may be raised while the server runs
    return most is None or descriptor < most - min(_KEPT, most // 4)


def _max_files() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit
