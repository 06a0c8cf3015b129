"""Responses that are kept in memory, so that clients can retrieve and continue them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ..generation.frames import encode_json
from ..protocol.response_items import Item, OutputItem
from ..protocol.responses import Response
from .background import BackgroundRun

MAX_BYTES = 256 * 2**20
NOT_KEPT = "it was not stored, was deleted, or made room for newer ones (--max-stored-responses)"
"""Why a response is not there, for errors."""


@dataclass(eq=False)
class StoredResponse:
    """A response with the items that it was made from, including those of the responses before it.

    `input_bytes` is how large those items were as JSON. `run` is what makes a background response.
    """

    response: Response
    items: Sequence[Item]
    input_bytes: int
    run: BackgroundRun | None = None
    size: int = 0  # bytes as JSON, set by the store

    @property
    def is_running(self) -> bool:
        """Whether it is still being made."""
        return self.response.status in ("queued", "in_progress")

    @property
    def conversation(self) -> Sequence[Item]:
        """All items up to and including the response's own."""
        return [*self.items, *self.response.output]


class ResponseStore:
    """Keeps the `max_responses` responses that were used last, and at most `max_bytes` of them.

    Those that are still running are kept in any case.
    """

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self.is_enabled = max_responses > 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._output_items: dict[str, OutputItem] = {}

    def add(self, stored: StoredResponse) -> None:
        """Keeps a response, or takes note that one that is kept has changed."""
        response = stored.response
        self._bytes -= stored.size
        stored.size = stored.input_bytes + len(encode_json(response))
        if stored.run is not None and stored.run.log is not None:
            stored.size += sum(map(len, stored.run.log.frames))
        self._bytes += stored.size
        self._responses[response.id] = stored
        self._responses.move_to_end(response.id)
        self._output_items.update((item.id, item) for item in response.output if item.id)
        self._evict()

    def get(self, response_id: str) -> StoredResponse | None:
        """A response, by its id."""
        stored = self._responses.get(response_id)
        if stored is not None:
            self._responses.move_to_end(response_id)
        return stored

    def output_item(self, item_id: str) -> OutputItem | None:
        """An item of a response that is kept, by the item's id."""
        return self._output_items.get(item_id)

    def remove(self, response_id: str) -> None:
        """Forgets a response. Does nothing if it is not kept."""
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            self._bytes -= stored.size
            for item in stored.response.output:
                self._output_items.pop(item.id or "", None)

    def _evict(self) -> None:
        for response_id in [key for key, stored in self._responses.items() if not stored.is_running]:
            if len(self._responses) <= self._max_responses and self._bytes <= self._max_bytes:
                return
            self.remove(response_id)
