"""A Vision without a model: an image is its own tile, and images of some widths misbehave."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator, Hashable
from typing import Any

import numpy as np

from tidewheel.engine.devices.tower import Rows, TowerExecutor
from tidewheel.engine.media.frames import Frames
from tidewheel.engine.media.media import Media
from tidewheel.engine.media.picture import Picture
from tidewheel.engine.media.vision import Expansion, Marks, Vision

ABORTS, SLEEPS, SPINS, GROWS, OPENS, CONNECTS, FAILS, REFUSES, LEAVES = range(501, 510)
MAX_SIDE = 2000


class TinyVision(Vision):
    placeholder = "<image>"
    slot = "<pad>"

    def __init__(self, settings: Hashable = "tiny") -> None:
        self.settings = settings

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        height, width = picture.shape[:2]
        if max(height, width) > MAX_SIDE:
            raise ValueError(f"a side of {max(height, width)} pixels is too long")
        misbehave(width)
        top = picture.pixels[: height // 2]
        return (picture, Picture(top[:, ::-1])), (height, width)

    def num_tokens(self, layout: Any) -> int:
        return int(sum(self.expansion(layout).counts))

    def expansion(self, layout: Any) -> Expansion:
        height, width = layout
        return Expansion("[<pad>|<pad>]", (height, width))

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        raise NotImplementedError


class TinyVideos(TinyVision):
    """A frame is its own tile."""

    video = Marks("<video>", "<frame>")

    def process_video(self, frames: Frames) -> tuple[tuple[Picture, ...], Hashable]:
        misbehave(frames.width)
        return tuple(frames.pictures), ("video", frames.seconds)

    def expansion(self, layout: Any) -> Expansion:
        if layout[0] != "video":
            return super().expansion(layout)
        return Expansion("".join(f"{second:g}:<frame>" for second in layout[1]), (2,) * len(layout[1]))


def misbehave(width: int) -> None:
    if width == ABORTS:
        os.abort()
    if width == SLEEPS:
        time.sleep(100)
    while width == SPINS:
        pass
    if width == GROWS:
        np.ones(2**31, np.uint8)
    if width == OPENS:
        open("/dev/zero").close()
    if width == CONNECTS:
        socket.socket().close()
    if width == FAILS:
        raise RuntimeError("a mistake")
    if width == REFUSES:
        raise ValueError("it has an unlucky width")
    if width == LEAVES:
        os._exit(0)
