"""SharedResponses: responses in a store that several replicas share; each replica answers for all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from tidewheel.engine.errors import quoted

from ..errors import ApiError
from ..generation.frames import encode_json, named_event
from ..protocol.response_events import ResponseFailed
from ..protocol.response_items import Item
from ..protocol.responses import Response, ResponseError
from ..stores.base import Kind, SharedStore, StoreError
from .background import EventLog, EventLogStream, KeptRun
from .store import Responses, StoredResponse

logger = logging.getLogger(__name__)

_DAYS = 30
_RUNNING = Kind(name="running", expires_s=20)  # a sign of life of the replica that makes a background response
_CANCELS = Kind(name="cancels", expires_s=600)  # what other replicas were asked to cancel
_LOOK_EVERY_S = 1.0
_SIGN_EVERY_S = 5.0
_LONGEST_CANCEL_S = 10.0


class _Entry(msgspec.Struct):
    """A response as it lies in the store. `events` are a streamed response's, once it has ended."""

    response: Response
    items: list[Item]
    input_bytes: int
    is_streamed: bool = False
    events: list[str] = []
    owner: str = ""


class SharedResponses(Responses):
    """Keeps the `max_responses` responses that were used last, for 30 days after that.

    A background response is made by the replica that was asked for it. Another one shows it, cancels it within a second
    or two, and streams its events when it has ended.
    """

    not_kept = (
        f"it was not stored, was deleted, was not used for {_DAYS} days, or made room for newer ones "
        "(--max-stored-responses)"
    )

    def __init__(self, store: SharedStore, max_responses: int) -> None:
        self._store = store
        self._kind = Kind(name="responses", expires_s=_DAYS * 86400, renews=True, most=max_responses)
        self._running: dict[str, StoredResponse] = {}  # made by this replica
        self._watch: asyncio.Task[None] | None = None
        self._followers: set[asyncio.Task[None]] = set()

    async def add(self, stored: StoredResponse) -> None:
        """See Responses."""
        response_id = stored.response.id
        if stored.is_running:
            await self._store.put(_RUNNING, response_id, b"")
        await self._store.put(self._kind, response_id, _encoded(stored))
        if stored.is_running:
            self._running[response_id] = stored
            if self._watch is None:
                self._watch = asyncio.create_task(self._look_after())

    async def update(self, stored: StoredResponse) -> None:
        """See Responses."""
        response_id = stored.response.id
        try:
            await self._store.put(self._kind, response_id, _encoded(stored), "there")
            await self._store.delete(_RUNNING, response_id)
        except ApiError as error:
            logger.warning("The response %s could not be kept, and counts as failed: %s", response_id, error.message)
        finally:
            self._running.pop(response_id, None)

    async def find(self, response_id: str) -> StoredResponse | None:
        """See Responses. Raises ApiError (500) for a response that is damaged."""
        if (own := self._running.get(response_id)) is not None:
            return own
        stored = await self._read(response_id)
        if stored is None or not stored.is_running or await self._store.get(_RUNNING, response_id) is not None:
            return stored
        stored = await self._read(response_id)  # it may have ended just now
        if stored is not None and stored.is_running:
            stored.response.status = "failed"
            stored.response.error = ResponseError("server_error", "the replica that made the response has ended")
            stored.run, stored.is_streamed = KeptRun(None), False
            await self._store.put(self._kind, response_id, _encoded(stored), "there")
        return stored

    async def remove(self, response_id: str) -> None:
        """See Responses."""
        self._running.pop(response_id, None)
        await self._store.delete(self._kind, response_id)

    async def close(self) -> None:
        """See Responses. What runs yet ends, and is kept so."""
        await asyncio.gather(*(one.run.cancel() for one in self._running.values() if one.run is not None))
        tasks = [*self._followers, *(() if self._watch is None else (self._watch,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def cancel(self, response_id: str) -> None:
        """Has another replica cancel a response. Raises ApiError (503) if it does not."""
        await self._store.put(_CANCELS, response_id, b"")
        deadline = time.monotonic() + _LONGEST_CANCEL_S
        while (stored := await self.find(response_id)) is not None and stored.is_running:
            if time.monotonic() > deadline:
                raise StoreError(f"the replica that makes the response {quoted(response_id)} has not cancelled it yet")
            await asyncio.sleep(_LOOK_EVERY_S / 4)

    def follow(self, response_id: str, log: EventLog, start: int) -> None:
        """Writes the events of another replica's response into a log, once it has ended, while the log has readers.

        If there are none, because that replica or the store has failed, the only event is an error with the number
        `start`.
        """
        follower = asyncio.create_task(self._follow(response_id, log, start))
        self._followers.add(follower)
        follower.add_done_callback(self._followers.discard)

    async def _follow(self, response_id: str, log: EventLog, start: int) -> None:
        ending = b""
        try:
            while (stored := await self.find(response_id)) is not None and stored.is_running:
                await asyncio.sleep(_LOOK_EVERY_S)
                if not log.has_readers:
                    return
            if stored is None:
                raise ApiError(HTTPStatus.NOT_FOUND, "the response was deleted", param="response_id")
            if stored.run is not None and stored.run.log is not None:
                log.frames += stored.run.log.frames
            else:
                ending = named_event(ResponseFailed(start, stored.response))
        except ApiError as error:
            ending = error.event()
        finally:
            log.complete(ending)

    async def _read(self, response_id: str) -> StoredResponse | None:
        raw = await self._store.get(self._kind, response_id)
        if raw is None:
            return None
        try:
            entry = msgspec.json.decode(raw, type=_Entry)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            logger.warning("The response %s in %s is damaged: %s", response_id, self._store.shown, error)
            message = f"the stored response {quoted(response_id)} is damaged: send the conversation without it"
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="damaged_response") from None
        if entry.response.id != response_id:
            return None
        stored = StoredResponse(entry.response, entry.items, entry.input_bytes, owner=entry.owner, size=len(raw))
        if stored.is_running:
            stored.run = _RunElsewhere(self, response_id, is_streamed=entry.is_streamed)
        elif entry.response.background:
            stored.run = KeptRun(_log_of(entry.events) if entry.is_streamed else None)
        return stored

    async def _look_after(self) -> None:
        """Gives signs of life of the responses that this replica makes, and cancels those that it is asked to."""
        signed = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            running = list(self._running.items())
            try:
                if time.monotonic() - signed > _SIGN_EVERY_S:
                    signed = time.monotonic()
                    for response_id, _ in running:
                        await self._store.put(_RUNNING, response_id, b"")
                for response_id, stored in running:
                    if await self._store.get(_CANCELS, response_id) is not None and stored.run is not None:
                        await stored.run.cancel()
                        await self._store.delete(_CANCELS, response_id)
            except ApiError as error:
                logger.warning("Background responses are not monitored: %s", error.message)


class _RunElsewhere(KeptRun):
    """A background response that another replica makes."""

    def __init__(self, responses: SharedResponses, response_id: str, *, is_streamed: bool) -> None:
        super().__init__(EventLog() if is_streamed else None)
        self._responses = responses
        self._response_id = response_id

    def stream(self, start: int = 0) -> EventLogStream:
        """See KeptRun."""
        stream = super().stream(start)
        assert self.log is not None
        self._responses.follow(self._response_id, self.log, start)
        return stream

    async def cancel(self) -> None:
        """See KeptRun."""
        await self._responses.cancel(self._response_id)


def _encoded(stored: StoredResponse) -> bytes:
    log = None if stored.run is None else stored.run.log
    entry = _Entry(stored.response, list(stored.items), stored.input_bytes, stored.is_streamed, owner=stored.owner)
    if log is not None and not stored.is_running:
        entry.events = [frame.decode() for frame in log.frames]
    return encode_json(entry)


def _log_of(events: Sequence[str]) -> EventLog:
    log = EventLog()
    log.frames += [event.encode() for event in events]
    log.complete()
    return log
