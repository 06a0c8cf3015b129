"""Background responses, which run on without their client, and event streams that clients can read again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from tidewheel.engine.core.stream import Sink

from ..chat.run import ChatRun
from ..errors import ApiError, ClientGone, as_api_error
from ..generation.frames import named_event
from ..generation.streaming import EventStream
from ..protocol.response_events import ResponseEvent
from .assembly import ResponseBuilder


class EventLog:
    """The frames of a stream, one an event. They are kept, so that any number of readers get all of them."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.ending = b""
        self.is_complete = False
        self._readers: set[EventLogReader] = set()

    def append(self, events: Iterable[ResponseEvent]) -> None:
        """Adds frames."""
        self.frames += map(named_event, events)
        self._tell()

    def complete(self, ending: bytes = b"") -> None:
        """Note that nothing more will be added. All readers get the `ending`, wherever they have begun."""
        self.ending, self.is_complete = ending, True
        self._tell()

    @property
    def has_readers(self) -> bool:
        """Whether it has readers now."""
        return bool(self._readers)

    def add(self, reader: EventLogReader) -> None:
        """Notifies `reader` of every new frame."""
        self._readers.add(reader)

    def remove(self, reader: EventLogReader) -> None:
        """Tells it no more."""
        self._readers.discard(reader)

    def _tell(self) -> None:
        for reader in list(self._readers):
            reader.push_news()


class EventLogReader:
    """One client that reads a log, from the event with the number `start` on. A source of an EventStream."""

    def __init__(self, log: EventLog, start: int) -> None:
        self._log = log
        self._next = start
        self._sink: Sink[bytes] | None = None
        self._is_paused = False
        self._has_ending = False

    def read(self, sink: Sink[bytes]) -> None:
        """Pushes all frames to `sink` as they come. Frames that are already in the log are pushed as one."""
        self._sink = sink
        self._log.add(self)
        self.push_news()

    def pause(self) -> None:
        """Pushes nothing until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Goes on pushing."""
        self._is_paused = False
        self.push_news()

    def abort(self) -> None:
        """Stops reading, because the client has hung up. The run that writes the log continues."""
        self._end(ClientGone())

    def close(self) -> None:
        """Note that this reader reads no more."""
        self._log.remove(self)

    def push_news(self) -> None:
        """Pushes what has not been pushed yet."""
        if self._sink is None or self._is_paused:
            return
        ready = self._log.frames[self._next :]
        self._next += len(ready)
        if self._log.is_complete and not self._has_ending:
            self._has_ending = True
            ready.append(self._log.ending)
        if any(ready):
            try:
                self._sink.push(b"".join(ready))
            except Exception as failure:  # one reader's failure is not the others'
                self._end(failure)
        if self._log.is_complete and not self._is_paused:
            self._end(None)

    def _end(self, failure: Exception | None) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.end(failure)


class EventLogStream(EventStream[bytes]):
    """Streams the frames of a log. If the run failed, one of the frames says so."""

    done = b""

    def frame(self, item: bytes) -> bytes:
        return item

    def failed(self, error: ApiError) -> bytes:
        return b""


class KeptRun:
    """The rest of a background response, or of another replica's response: its events, if `log` keeps any."""

    def __init__(self, log: EventLog | None) -> None:
        self.log = log

    def stream(self, start: int = 0) -> EventLogStream:
        """The events from number `start` on, for a run that is streamed."""
        assert self.log is not None, "only streamed runs keep their events"
        return EventLogStream(EventLogReader(self.log, start))

    async def cancel(self) -> None:
        """Ends the run. A response that has ended already stays as it is."""


class BackgroundRun(KeptRun):
    """Answers in a task of its own until the answer is whole, fails or is cancelled; then awaits `on_end`.

    With `is_streamed`, `log` keeps all events.
    """

    def __init__(
        self, run: ChatRun, builder: ResponseBuilder, on_end: Callable[[], Awaitable[None]], *, is_streamed: bool
    ) -> None:
        super().__init__(EventLog() if is_streamed else None)
        self._abort: Callable[[], None] = run.generation.abort
        self._note(builder.begin())
        self._task = asyncio.create_task(self._answer(run, builder, on_end))

    async def ended(self) -> None:
        """Wait for the end, however it comes."""
        await asyncio.wait([self._task])

    async def cancel(self) -> None:
        """See KeptRun."""
        self._abort()
        await asyncio.shield(self._task)

    async def _answer(self, run: ChatRun, builder: ResponseBuilder, on_end: Callable[[], Awaitable[None]]) -> None:
        try:
            await run.generation.feed(lambda output: self._note(builder.push(run.delta(output))))
            self._note(builder.finish(run.usage()))
        except ClientGone:
            builder.response.status = "cancelled"
        except Exception as failure:
            self._note(builder.fail(as_api_error(failure)))
        finally:
            run.generation.close()
            self._abort = lambda: None  # nothing of what made the response is kept
            if self.log is not None:
                self.log.complete()
            await on_end()

    def _note(self, events: Iterable[ResponseEvent]) -> None:
        if self.log is not None:
            self.log.append(events)
            return
        for _ in events:  # the response is built as they are read
            pass
