"""Images for tests of the server: files of which a reader makes as many tokens as they say, without decoding."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.media.media import Media, MediaSpan
from tidewheel.engine.media.placeholders import ExpandedPrompt, expand, spread
from tidewheel.engine.media.vision import Expansion

SIGN = b"an image of "


def file(num_tokens: int, name: str = "") -> bytes:
    """A file of an image that has so many tokens."""
    return SIGN + f"{num_tokens} {name}".encode()


def sent(num_tokens: int, name: str = "") -> str:
    """The base64 of one."""
    return base64.b64encode(file(num_tokens, name)).decode()


def url(num_tokens: int, name: str = "") -> str:
    """Its data: URL."""
    return f"data:image/png;base64,{sent(num_tokens, name)}"


def part(num_tokens: int, name: str = "") -> dict[str, Any]:
    """A part of a chat completion's message."""
    return {"type": "image_url", "image_url": {"url": url(num_tokens, name)}}


class CountingVision:
    """Writes an image as its layout says: a number of tokens, between marks; with several tiles one slot for each."""

    def __init__(self, placeholder: str, slot: str, tiles: int) -> None:
        self.placeholder, self.slot, self._tiles = placeholder, slot, tiles

    def expansion(self, num_tokens: int) -> Expansion:
        return Expansion(f"<img>{self.slot * self._tiles}</img>", (num_tokens,) * self._tiles)


class CountingReader:
    """In place of a MediaReader."""

    def __init__(self, slot_id: int, placeholder: str = "<image>", slot: str = "<pad>", tiles: int = 1) -> None:
        self.placeholder, self.slot = placeholder, slot
        self._slot_id, self._tiles = slot_id, tiles
        self._vision: Any = CountingVision(placeholder, slot, tiles)
        self.params: list[str] = []
        self.gate = threading.Event()
        """Images are read once it is set."""
        self.gate.set()
        self.num_cancelled = 0

    async def read(self, data: bytes, param: str) -> Media:
        self.params.append(param)
        try:
            await asyncio.to_thread(self.gate.wait)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if not data.startswith(SIGN):
            raise InvalidRequestError(f"{param} cannot be read as an image: it has another sign", param)
        count, _, name = data[len(SIGN) :].decode().partition(" ")
        tile = np.zeros((4, 4, 3), np.uint8)
        return Media((tile,), int(count), int(count) * self._tiles, name.encode(), 4, 4)

    def expand(self, text: str, media: Sequence[Media], param: str) -> ExpandedPrompt:
        return expand(self._vision, text, media, param)

    def spread(self, token_ids: Sequence[int], expanded: ExpandedPrompt) -> tuple[list[int], tuple[MediaSpan, ...]]:
        return spread(self._vision, self._slot_id, token_ids, expanded)

    def close(self) -> None:
        pass


def seeing(template: str | None = None, *, slot: str = "<pad>", placeholder: str = "<image>", tiles: int = 1) -> Any:
    """Options of a ScriptedEngine that sees images."""
    specials = dict.fromkeys([slot, placeholder])
    reader = CountingReader(260 + list(specials).index(slot), placeholder, slot, tiles)
    return {"media": reader, "specials": list(specials), **({} if template is None else {"template": template})}
