"""Turns at something that few can have at once: in the order of clients, and of one client in the order of coming."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Gives out turns, at most `count` at once and one to a client. Lives on the event loop."""

    def __init__(self, count: int) -> None:
        self.waiting = 0
        self._free = count
        self._active: set[str] = set()
        # Each client's, those first whose turn comes first.
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        self._failure: Exception | None = None

    async def take(self, client: str, timeout_s: float) -> None:
        """Wait for a turn, which `give_back` ends. Raises TimeoutError if it does not come in time."""
        self._check_open()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(client, deque()).append(place)
        self.waiting += 1
        self._hand_out()
        try:
            await asyncio.wait([place], timeout=timeout_s)
        except asyncio.CancelledError:
            if place.done():
                self.give_back(client)
            raise
        finally:
            self.waiting -= 1
            if not place.done():
                self._leave(client, place)
        if not place.done():
            raise TimeoutError
        place.result()
        self._check_open()  # that may have changed since the turn came

    def give_back(self, client: str) -> None:
        """End a client's turn."""
        self._free += 1
        self._active.discard(client)
        if client in self._queues:  # behind all others
            self._queues[client] = self._queues.pop(client)
        self._hand_out()

    def close(self, failure: Exception) -> None:
        """Fail those who wait, and all who come."""
        self._failure = failure
        for queue in self._queues.values():
            for place in queue:
                place.set_exception(failure)
        self._queues.clear()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _hand_out(self) -> None:
        for client in [client for client in self._queues if client not in self._active][: self._free]:
            place = self._queues[client][0]
            self._leave(client, place)
            self._free -= 1
            self._active.add(client)
            place.set_result(None)

    def _leave(self, client: str, place: asyncio.Future[None]) -> None:
        queue = self._queues[client]
        queue.remove(place)
        if not queue:
            del self._queues[client]
