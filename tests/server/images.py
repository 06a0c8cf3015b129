"""Images for tests of the server: files of which a reader makes as many tokens as they say, without decoding."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.media.media import Media, MediaFiles, MediaSpan, Modality
from tidewheel.engine.media.placeholders import ExpandedPrompt, expand, spread
from tidewheel.engine.media.vision import Expansion, Marks

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


def frames(*num_tokens: int) -> str:
    """A URL of the frames of a video, each with so many tokens."""
    return "data:video/jpeg;base64," + ",".join(map(sent, num_tokens))


class CountingVision:
    """Writes an image as its layout says: a number of tokens, between marks; with several tiles one slot for each.

    A video has a slot for each frame, behind its time.
    """

    numbering = numbered = ""

    def __init__(self, marks: Mapping[Modality, Marks], tiles: int) -> None:
        self.marks, self._tiles = marks, tiles

    def expansion(self, layout: int | tuple[Any, ...]) -> Expansion:
        if isinstance(layout, int):
            return Expansion(f"<img>{self.marks['image'].slot * self._tiles}</img>", (layout,) * self._tiles)
        fps, counts = layout
        text = "".join(f"<{i / fps:g}>{self.marks['video'].slot}" for i in range(len(counts)))
        return Expansion(text, counts)


class CountingReader:
    """In place of a MediaReader."""

    def __init__(
        self,
        slot_id: int,
        placeholder: str = "<image>",
        slot: str = "<pad>",
        tiles: int = 1,
        video: tuple[Marks, int] | None = None,
    ) -> None:
        self.marks: dict[Modality, Marks] = {"image": Marks(placeholder, slot)}
        self._slot_ids: dict[Modality, int] = {"image": slot_id}
        if video is not None:
            self.marks["video"], self._slot_ids["video"] = video
        self._tiles = tiles
        self._vision: Any = CountingVision(self.marks, tiles)
        self.params: list[str] = []
        self.settings: list[Any] = []
        self.gate = threading.Event()
        """Images are read once it is set."""
        self.gate.set()
        self.num_cancelled = 0
        self.named: dict[tuple[str, Modality], Media] = {}

    def check(self, fields: Mapping[str, Any], param: str) -> None:
        if "max_pixels" not in fields:
            raise InvalidRequestError(f"{param}: only max_pixels is supported", param)

    def recall(
        self, name: str, modality: Modality, fields: Mapping[str, Any] | None = None, fields_param: str = ""
    ) -> Media | None:
        return self.named.get((name, modality))

    async def read(
        self,
        sent: MediaFiles,
        param: str,
        fields: Mapping[str, Any] | None = None,
        fields_param: str = "",
        name: str | None = None,
    ) -> Media:
        media = await self._read(sent, param, fields)
        if name is not None:
            self.named[name, sent.modality] = media
        return media

    async def _read(self, sent: MediaFiles, param: str, fields: Mapping[str, Any] | None) -> Media:
        self.params.append(param)
        self.settings.append(fields)
        try:
            await asyncio.to_thread(self.gate.wait)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if not all(data.startswith(SIGN) for data in sent.files):
            raise InvalidRequestError(f"{param} cannot be read as an image: it has another sign", param)
        said = [data[len(SIGN) :].decode().partition(" ") for data in sent.files]
        counts, name = tuple(int(count) for count, _, _ in said), said[0][2].encode()
        tile = np.zeros((4, 4, 3), np.uint8)
        if sent.modality == "video":
            return Media((tile,), (sent.fps, counts), sum(counts), name, 4, 4, "video")
        return Media((tile,), counts[0], counts[0] * self._tiles, name, 4, 4)

    def expand(self, text: str, media: Sequence[Media], param: str) -> ExpandedPrompt:
        return expand(self._vision, text, media, param)

    def spread(self, token_ids: Sequence[int], expanded: ExpandedPrompt) -> tuple[list[int], tuple[MediaSpan, ...]]:
        return spread(self._vision, self._slot_ids, token_ids, expanded)

    def close(self) -> None:
        pass


def seeing(
    template: str | None = None,
    *,
    slot: str = "<pad>",
    placeholder: str = "<image>",
    tiles: int = 1,
    video: Marks | None = None,
) -> Any:
    """Options of a ScriptedEngine that sees images, and with `video` videos."""
    specials = dict.fromkeys([slot, placeholder, *(video or ())])
    numbers = {token: 260 + i for i, token in enumerate(specials)}
    videos = None if video is None else (video, numbers[video.slot])
    reader = CountingReader(numbers[slot], placeholder, slot, tiles, videos)
    return {"media": reader, "specials": list(specials), **({} if template is None else {"template": template})}
