"""Responses that are kept, so that clients can retrieve and continue them: in memory, or where replicas share them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ..generation.frames import encode_json
from ..protocol.response_items import Item, OutputItem
from ..protocol.responses import Response
from .assembly import response_of_item
from .background import KeptRun

MAX_BYTES = 256 * 2**20
_FRAME_BYTES = 48  # of each frame of a log, beside its text


def held_bytes(text: bytes | bytearray) -> int:
    """About how much memory is taken by what JSON is decoded to: many small objects take several times its length.

    Brackets and commas within its strings count too, which takes much less time than to tell them apart.
    """
    character = 1 if text.isascii() and b"\\u" not in text else 4  # one wide character widens the whole string
    objects = text.count(b"{") + text.count(b"[")
    return character * len(text) + 150 * objects + 110 * text.count(b'":') + 40 * text.count(b",")


@dataclass(eq=False)
class StoredResponse:
    """A response with the items that it was made from, including those of the responses before it.

    `input_bytes` is what those items take in memory, by an estimate. `run` is what makes or has made a background
    response, and `is_streamed` says whether that keeps its events.
    """

    response: Response
    items: Sequence[Item]
    input_bytes: int
    run: KeptRun | None = None
    is_streamed: bool = False
    size: int = 0  # bytes in memory by an estimate, set by the store

    @property
    def is_running(self) -> bool:
        """Whether it is still being made."""
        return self.response.status in ("queued", "in_progress")

    @property
    def conversation(self) -> Sequence[Item]:
        """All items up to and including the response's own."""
        return [*self.items, *self.response.output]


class Responses(ABC):
    """Keeps responses by their ids."""

    is_enabled = True
    not_kept: str
    """Why a response may not be there, for errors."""

    @abstractmethod
    async def add(self, stored: StoredResponse) -> None:
        """Keeps a response."""

    @abstractmethod
    async def update(self, stored: StoredResponse) -> None:
        """Takes note that a response has ended, unless it was removed meanwhile."""

    @abstractmethod
    async def get(self, response_id: str) -> StoredResponse | None:
        """A response, by its id."""

    @abstractmethod
    async def remove(self, response_id: str) -> None:
        """Forgets a response. Does nothing if it is not kept."""

    async def output_item(self, item_id: str) -> OutputItem | None:
        """An item of a response that is kept, by the item's id."""
        stored = await self.get(response_of_item(item_id))
        output = () if stored is None else stored.response.output
        return next((item for item in output if item.id == item_id), None)

    @abstractmethod
    async def close(self) -> None:
        """Keeps nothing more."""


class ResponseStore(Responses):
    """Keeps the `max_responses` responses that were used last in memory, and at most `max_bytes` of them.

    Those that are still running are kept in any case.
    """

    not_kept = "it was not stored, was deleted, or made room for newer ones (--max-stored-responses)"

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self.is_enabled = max_responses > 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    async def add(self, stored: StoredResponse) -> None:
        """See Responses."""
        self._bytes -= stored.size
        stored.size = stored.input_bytes + held_bytes(encode_json(stored.response))
        if stored.run is not None and stored.run.log is not None:
            stored.size += sum(len(frame) + _FRAME_BYTES for frame in stored.run.log.frames)
        self._bytes += stored.size
        self._responses[stored.response.id] = stored
        self._responses.move_to_end(stored.response.id)
        await self._evict()

    async def update(self, stored: StoredResponse) -> None:
        """See Responses."""
        if self._responses.get(stored.response.id) is stored:
            await self.add(stored)

    async def get(self, response_id: str) -> StoredResponse | None:
        """See Responses."""
        stored = self._responses.get(response_id)
        if stored is not None:
            self._responses.move_to_end(response_id)
        return stored

    async def remove(self, response_id: str) -> None:
        """See Responses."""
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            self._bytes -= stored.size

    async def close(self) -> None:
        """See Responses."""

    async def _evict(self) -> None:
        for response_id in [key for key, stored in self._responses.items() if not stored.is_running]:
            if len(self._responses) <= self._max_responses and self._bytes <= self._max_bytes:
                return
            await self.remove(response_id)
