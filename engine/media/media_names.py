"""MediaNames: names that clients gave to their images and videos, to ask about them again without sending them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from .media import Modality
from .vision import Vision

_MOST_NAMES = 65536


class MediaNames:
    """Which key of the MediaCache a name stands for. The names that were used longest ago are forgotten.

    To be used on the event loop.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, bytes] = OrderedDict()

    def put(self, name: str, modality: Modality, vision: Vision | None, key: bytes) -> None:
        """Let a name stand for a key, whatever it stood for before. `vision` is the one of a request's settings."""
        named = _digest(name, modality, vision)
        self._keys[named] = key
        self._keys.move_to_end(named)
        if len(self._keys) > _MOST_NAMES:
            self._keys.popitem(last=False)

    def get(self, name: str, modality: Modality, vision: Vision | None) -> bytes | None:
        """The key of a name, which then is the one used last; None for a name that is not known."""
        named = _digest(name, modality, vision)
        if named in self._keys:
            self._keys.move_to_end(named)
        return self._keys.get(named)


def _digest(name: str, modality: Modality, vision: Vision | None) -> bytes:
    settings = None if vision is None else vision.settings
    return hashlib.sha256(repr((name, modality, settings)).encode()).digest()
