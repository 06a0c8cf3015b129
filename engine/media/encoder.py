"""MediaEncoder: computes the embeddings of media before their prompts run, a few milliseconds at a time."""

from __future__ import annotations

import heapq
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator
from itertools import count
from typing import Generic, TypeVar

import numpy as np
from msgspec import Struct

from ..devices.tower import Rows, TowerExecutor
from ..side_work import SideWork
from .media import Media
from .prompt_media import PromptMedia
from .vision import Vision

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Encoded(Struct, Generic[T], frozen=True):
    """A prompt whose media have their embeddings, or never will: with an `error`, in words."""

    prompt: T
    error: str | None = None


class _Waiting(Struct, Generic[T]):
    prompt: T
    media: PromptMedia
    is_wanted: bool = True


class MediaEncoder(SideWork, Generic[T]):
    """Prompts of type T wait here for their media's embeddings, the first by their order first.

    Embeddings are kept by content in `max_bytes`, least recently used first to go, so that the next question about a
    picture needs none. As those of prompts that run cannot go, no further ones are made when they take as much, unless
    nothing runs. Everything is called on the engine thread.
    """

    def __init__(self, vision: Vision, tower: TowerExecutor, max_bytes: int) -> None:
        self.encoded_total = 0
        self.reused_total = 0
        self._vision, self._tower, self._max_bytes = vision, tower, max_bytes
        self._heap: list[tuple[tuple[int, int, int], int, _Waiting[T]]] = []
        self._numbers = count()
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()
        self._kept_bytes = 0
        self._in_use: weakref.WeakSet[PromptMedia] = weakref.WeakSet()
        self._encoded: list[Encoded[T]] = []
        self._current: tuple[_Waiting[T], Media, Generator[None, None, Rows]] | None = None

    def __len__(self) -> int:
        """How many prompts wait."""
        return len([entry for _, _, entry in self._heap if entry.is_wanted])

    def add(self, prompt: T, media: PromptMedia, order: tuple[int, int, int]) -> None:
        """Let a prompt wait. Lower orders come first; no two are equal."""
        heapq.heappush(self._heap, (order, next(self._numbers), _Waiting(prompt, media)))

    def drop(self, is_dropped: Callable[[T], bool]) -> list[T]:
        """Forget the prompts that are dropped, and return them."""
        dropped = [entry for _, _, entry in self._heap if entry.is_wanted and is_dropped(entry.prompt)]
        for entry in dropped:
            entry.is_wanted = False
        if self._current is not None and not self._current[0].is_wanted:
            self._current = None
        return [entry.prompt for entry in dropped]

    @property
    def is_waiting(self) -> bool:
        """See SideWork."""
        return any(entry.is_wanted for _, _, entry in self._heap)

    def run_piece(self, piece_s: float, *, nothing_runs: bool) -> bool:
        """See SideWork."""
        self._tower.piece_s = piece_s
        found = self._first()
        if found is None or (not nothing_runs and self._bytes_in_use() >= self._max_bytes):
            return False
        entry, missing = found
        try:
            self._encode(entry, missing)
        except Exception as error:  # of this picture; others go on
            logger.exception("An image could not be encoded")
            self._current = None
            heapq.heappop(self._heap)
            self._encoded.append(Encoded(entry.prompt, f"an image could not be encoded: {error}"))
        self._first()
        return True

    def take_encoded(self) -> list[Encoded[T]]:
        """The prompts that need wait no longer since the last call, in their order."""
        encoded, self._encoded = self._encoded, []
        return encoded

    def close(self, failure: BaseException | None = None) -> None:
        """Free the tower and all embeddings."""
        self._heap.clear()
        self._current = None
        self._kept.clear()
        self._tower.close()

    def _first(self) -> tuple[_Waiting[T], Media] | None:
        """The first prompt that waits, and its first medium without embeddings. Those before it that have all go."""
        while self._heap:
            entry = self._heap[0][-1]
            if entry.is_wanted:
                missing = self._missing(entry.media)
                if missing is not None:
                    return entry, missing
                self._in_use.add(entry.media)
                self._encoded.append(Encoded(entry.prompt))
            heapq.heappop(self._heap)
        return None

    def _missing(self, prompt: PromptMedia) -> Media | None:
        """The first medium without embeddings, after those that are kept were given to the prompt."""
        for media in prompt.media:
            if media.digest in prompt.embeddings:
                continue
            rows = self._kept.get(media.digest)
            if rows is None:
                return media
            self._kept.move_to_end(media.digest)
            self.reused_total += 1
            prompt.embeddings[media.digest] = rows
        return None

    def _encode(self, entry: _Waiting[T], media: Media) -> None:
        if self._current is None or self._current[1].digest != media.digest:
            self._current = (entry, media, self._vision.encode(media, self._tower))
        try:
            next(self._current[2])
            return
        except StopIteration as end:
            rows: Rows = end.value
        self._current = None
        self.encoded_total += 1
        if self._vision.embedding_multiplier != 1:
            embeddings = rows[:, : rows.shape[1] // (1 + len(self._vision.added_after))]
            embeddings *= np.float32(self._vision.embedding_multiplier)
        rows.flags.writeable = False
        entry.media.embeddings[media.digest] = rows
        self._keep(media.digest, rows)

    def _keep(self, digest: bytes, rows: Rows) -> None:
        self._kept[digest] = rows
        self._kept_bytes += rows.nbytes
        while self._kept_bytes > self._max_bytes:
            _, gone = self._kept.popitem(last=False)
            self._kept_bytes -= gone.nbytes

    def _bytes_in_use(self) -> int:
        """Of prompts that run or are about to."""
        sizes = {digest: rows.nbytes for media in self._in_use for digest, rows in media.embeddings.items()}
        return sum(sizes.values())
