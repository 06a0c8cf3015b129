"""Responses that are kept, so that clients can retrieve and continue them: in memory, or where replicas share them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ..generation.frames import encode_json
from ..http.api_keys import current_tenant
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

    `input_bytes` estimates those items' memory. `run` makes or has made a background response, and `is_streamed` says
    whether it keeps its events. `owner` is the owner of the key that it was made with.
    """

    response: Response
    items: Sequence[Item]
    input_bytes: int
    run: KeptRun | None = None
    is_streamed: bool = False
    owner: str = ""
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

    async def get(self, response_id: str) -> StoredResponse | None:
        """A response that the current tenant may see, by its id."""
        stored = await self.find(response_id)
        return stored if stored is not None and current_tenant().sees(stored.owner) else None

    @abstractmethod
    async def find(self, response_id: str) -> StoredResponse | None:
        """A response, whosever it is, by its id."""

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


class _Shelf:
    """The responses of one owner, those that were used last behind, and what they take in memory."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.bytes = 0

    def oldest(self) -> StoredResponse | None:
        """The one to forget first."""
        return next((stored for stored in self.responses.values() if not stored.is_running), None)


class ResponseStore(Responses):
    """Keeps the `max_responses` responses that were used last in memory, and at most `max_bytes` of them.

    Running responses are always kept. If there are too many responses or bytes, the owner with most of them loses some.
    So an owner with less than an equal part loses no response to others.
    """

    not_kept = "it was not stored, was deleted, or made room for newer ones (--max-stored-responses)"

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self.is_enabled = max_responses > 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0
        self._responses: dict[str, StoredResponse] = {}
        self._shelves: dict[str, _Shelf] = {}  # by owner, none of them empty

    async def add(self, stored: StoredResponse) -> None:
        """See Responses."""
        await self.remove(stored.response.id)
        stored.size = stored.input_bytes + held_bytes(encode_json(stored.response))
        if stored.run is not None and stored.run.log is not None:
            stored.size += sum(len(frame) + _FRAME_BYTES for frame in stored.run.log.frames)
        shelf = self._shelves.setdefault(stored.owner, _Shelf())
        shelf.responses[stored.response.id] = self._responses[stored.response.id] = stored
        shelf.bytes += stored.size
        self._bytes += stored.size
        await self._evict()

    async def update(self, stored: StoredResponse) -> None:
        """See Responses."""
        if self._responses.get(stored.response.id) is stored:
            await self.add(stored)

    async def get(self, response_id: str) -> StoredResponse | None:
        """See Responses."""
        stored = await super().get(response_id)
        if stored is not None:
            self._shelves[stored.owner].responses.move_to_end(response_id)
        return stored

    async def find(self, response_id: str) -> StoredResponse | None:
        """See Responses."""
        return self._responses.get(response_id)

    async def remove(self, response_id: str) -> None:
        """See Responses."""
        stored = self._responses.pop(response_id, None)
        if stored is None:
            return
        shelf = self._shelves[stored.owner]
        del shelf.responses[response_id]
        shelf.bytes -= stored.size
        self._bytes -= stored.size
        if not shelf.responses:
            del self._shelves[stored.owner]

    async def close(self) -> None:
        """See Responses."""

    async def _evict(self) -> None:
        while (oldest := self._to_forget()) is not None:
            await self.remove(oldest.response.id)

    def _to_forget(self) -> StoredResponse | None:
        limits = (
            (self._bytes, self._max_bytes, lambda shelf: shelf.bytes),
            (len(self._responses), self._max_responses, lambda shelf: len(shelf.responses)),
        )
        for total, limit, held_by in limits:
            if total <= limit:
                continue
            for shelf in sorted(self._shelves.values(), key=held_by, reverse=True):
                if held_by(shelf) * len(self._shelves) <= limit:
                    break  # what is too much is others' that still run
                if (oldest := shelf.oldest()) is not None:
                    return oldest
        return None
