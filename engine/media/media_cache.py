"""MediaCache: images that were decoded lately, by the content of their files."""

from __future__ import annotations

import threading
from collections import OrderedDict

from .media import Media

_ENTRY_BYTES = 1024  # of an image besides its pixels


class MediaCache:
    """Keeps decoded images of at most `max_bytes` together; the least recently used are dropped.

    May be used from several threads.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Media] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: bytes) -> Media | None:
        """The image of a key, which then is the most recently used."""
        with self._lock:
            media = self._kept.get(key)
            if media is not None:
                self._kept.move_to_end(key)
            return media

    def put(self, key: bytes, media: Media) -> None:
        """Keep an image, unless it alone is too large."""
        size = _size(media)
        if size > self._max_bytes:
            return
        with self._lock:
            if (known := self._kept.pop(key, None)) is not None:
                self.num_bytes -= _size(known)
            self._kept[key] = media
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self.num_bytes -= _size(dropped)


def _size(media: Media) -> int:
    return _ENTRY_BYTES + sum(tile.nbytes for tile in media.tiles)
