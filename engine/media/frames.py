"""Frames of videos: which of them are taken, and when they are shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .picture import Picture

_LEAST_FRAMES = 4


class Frames(NamedTuple):
    """The frames of a video that are taken, one after the other.

    `seconds` says when each is shown first, and `fps` how many of them there are in a second.
    """

    height: int
    width: int
    seconds: tuple[float, ...]
    fps: float
    pictures: Iterator[Picture]


def sampled(count: int, duration: float, fps: float, most: int) -> list[int]:
    """Which of `count` frames of `duration` seconds are taken: `fps` in a second, at least 4 and at most `most`.

    They are spread evenly, with the first and the last frame, as Qwen3-VL's processor of transformers does it.
    """
    wanted = min(max(int(duration * fps), _LEAST_FRAMES), most, count)
    return [int(index) for index in np.linspace(0, count - 1, wanted).round()]
