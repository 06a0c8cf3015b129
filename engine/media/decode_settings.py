"""DecodeSettings: how files become pixels, and how many of these there may be."""

from __future__ import annotations

from ..declaring.record import record

DEFAULT_MAX_BYTES = 20_000_000  # of the files of an image or a video
MAX_FRAMES = 768  # of a video, whatever the options say; as many as Qwen's processors take
LEAST_FPS, MOST_FPS = 0.01, 1000.0  # of the frames of a video


@record(frozen=True, slots=True)
class DecodeSettings:
    """An image, or a frame, may have `max_pixels`; transparent pixels are put on `background`, in RGB.

    Of a video `fps` frames in a second are taken, and at most `max_frames`.
    """

    max_pixels: int = 64 * 2**20  # a phone's photo has up to 50 million; decoding takes up to 16 bytes for each
    background: tuple[int, int, int] = (255, 255, 255)
    max_frames: int = 32
    fps: float = 2.0
