"""Lets connections in while there are file descriptors for them.

Event loops take what comes until the process has no descriptor left. Then uvloop resets connections and says nothing,
asyncio's own loop logs thousands of tracebacks, and whatever else opens a file fails. Here some descriptors are kept
for the rest of the server, and clients wait in the listener's queue until connections have ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_AT_ONCE = 64  # connections, before others have their turn
_KEPT = 32  # descriptors for everything that is not a connection, or fewer where there are few
_RETRY_S = 0.25
_LOG_EVERY_S = 60.0


class Acceptor:
    """Accepts connections from `listener` for protocols that `make_protocol` makes; `count` says how many are open."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        backlog: int,
        count: Callable[[], int],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._count = count
        self._retry: asyncio.TimerHandle | None = None
        self._logged = float("-inf")
        self._starting: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        listener.listen(backlog)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Let nobody in any more."""
        self._loop.remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                if not self._has_room():
                    self._wait()
                    return
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # none are left in the whole system, or there is no memory
                self._wait(error)
                return
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._start(connection))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection, ssl=self._tls)
        except (OSError, asyncio.TimeoutError) as error:  # it has gone, or did not get through the TLS handshake
            logger.debug("A connection did not come about: %s", error)
            connection.close()

    def _has_room(self) -> bool:
        """Whether more descriptors are free than are kept; the system gives out the lowest one first."""
        most = _max_files()  # anew, for it may be raised while the server runs
        lowest = os.dup(self._listener.fileno())
        os.close(lowest)
        return most is None or lowest < most - min(_KEPT, most // 4)

    def _wait(self, error: OSError | None = None) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(_RETRY_S, self._go_on)
        now = time.monotonic()
        if now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            logger.error(
                "No file descriptors are left for connections: %d are open, new ones have to wait; the limit is %s "
                "files (ulimit -n, or systemd's LimitNOFILE)%s",
                self._count() + len(self._starting),
                _max_files(),
                "" if error is None else f": {error}",
            )

    def _go_on(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener.fileno(), self._accept)


def _max_files() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit
