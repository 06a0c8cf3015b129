"""Responses that go on without their client, and event streams that clients may come back to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from ..chat.path import ChatRun
from ..errors import ClientGone, as_api_error
from ..generation.streaming import EventStream, StreamEnd, named_event
from ..protocol.response_events import ResponseEvent
from .assembly import ResponseBuilder


class EventLog:
    """The frames of a stream, one an event. They are kept, so that any number of readers get all of them."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.is_complete = False
        self._news = asyncio.Event()

    def append(self, events: Iterable[ResponseEvent]) -> None:
        """Adds frames."""
        self.frames += map(named_event, events)
        self.wake()

    def complete(self) -> None:
        """Nothing more will be added."""
        self.is_complete = True
        self.wake()

    def wake(self) -> None:
        """Lets waiting readers look again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def news(self) -> None:
        """Waits until there is something to look at."""
        await self._news.wait()


class EventLogReader:
    """One client that reads a log, from the event with the number `start` on. A `source` of an EventStream."""

    def __init__(self, log: EventLog, start: int) -> None:
        self._log = log
        self._next = start
        self._gone = False

    def abort(self) -> None:
        """The client has hung up; what it read from goes on."""
        self._gone = True
        self._log.wake()

    def close(self) -> None:
        """There is nothing to give back."""

    async def forward(self, write: Callable[[bytes], bool]) -> None:
        """There are only `frames`."""

    async def frames(self) -> AsyncIterator[bytes]:
        """All frames, as they come. Raises ClientGone after `abort`."""
        while True:
            if self._gone:
                raise ClientGone
            if self._next < len(self._log.frames):
                ready = self._log.frames[self._next :]
                self._next += len(ready)
                yield b"".join(ready)
            elif self._log.is_complete:
                return
            else:
                await self._log.news()


class BackgroundRun:
    """Answers in a task of its own until the answer is whole, fails or is cancelled; then calls `on_end`.

    With `is_streamed`, `log` keeps all events.
    """

    def __init__(
        self, run: ChatRun, builder: ResponseBuilder, on_end: Callable[[], None], *, is_streamed: bool
    ) -> None:
        self.log = EventLog() if is_streamed else None
        self._abort: Callable[[], None] = run.generation.abort
        self._note(builder.begin())
        self._task = asyncio.create_task(self._answer(run, builder, on_end))

    def stream(self, start: int = 0) -> EventStream:
        """The events from number `start` on, for a run that is streamed."""
        assert self.log is not None, "only streamed runs keep their events"
        return EventStream(EventLogReader(self.log, start), StreamEnd(b"", lambda error: b""))

    async def cancel(self) -> None:
        """Ends the run. A response that has ended already stays as it is."""
        self._abort()
        await asyncio.shield(self._task)

    async def _answer(self, run: ChatRun, builder: ResponseBuilder, on_end: Callable[[], None]) -> None:
        try:
            async for delta in run.deltas():
                self._note(builder.push(delta))
            self._note(builder.finish(run.usage()))
        except ClientGone:
            builder.response.status = "cancelled"
        except Exception as failure:
            self._note(builder.fail(as_api_error(failure)))
        finally:
            run.close()
            self._abort = lambda: None  # nothing of what made the response is kept
            if self.log is not None:
                self.log.complete()
            on_end()

    def _note(self, events: Iterable[ResponseEvent]) -> None:
        if self.log is not None:
            self.log.append(events)
            return
        for _ in events:  # the response is built as they are read
            pass
