"""EventReader: what one reader has not read yet of a host's events."""

from __future__ import annotations

import asyncio
from collections import deque

from .units import Event

_MOST_UNREAD = 1000


class EventReader:
    """An asynchronous iterator over the events since it was made.

    A unit's next event replaces its progress that was not read yet, so a slow reader loses progress alone. The iterator
    ends for who leaves a thousand changes unread; who begins again looks at the host's snapshot first.
    """

    def __init__(self) -> None:
        self._changes: deque[Event] = deque()
        self._progress: dict[str, Event] = {}  # newer than the changes of the same unit
        self._wake = asyncio.Event()
        self._ended = False

    def put(self, event: Event) -> None:
        """Called by the host."""
        if self._ended:
            return
        self._progress.pop(event.name, None)
        if event.progress is not None:
            self._progress[event.name] = event
        elif len(self._changes) < _MOST_UNREAD:
            self._changes.append(event)
        else:
            self._ended = True
        self._wake.set()

    def end(self) -> None:
        """No more events will come; those that are there are still read."""
        self._ended = True
        self._wake.set()

    def __aiter__(self) -> EventReader:
        return self

    async def __anext__(self) -> Event:
        while not self._changes and not self._progress:
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        if self._changes:
            return self._changes.popleft()
        return self._progress.pop(next(iter(self._progress)))
