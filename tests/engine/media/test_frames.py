"""Frames of videos: those of animations and of lists of files, when they are shown, and their bounds."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from optional_packages import require_packages

require_packages("PIL")

from engine.media.pictures import colors, png, saved  # noqa: E402
from engine.media.tiny_vision import REFUSES, TinyVideos  # noqa: E402
from PIL import Image  # noqa: E402

from tidewheel.engine.errors import InvalidRequestError  # noqa: E402
from tidewheel.engine.media.decode_settings import DecodeSettings  # noqa: E402
from tidewheel.engine.media.errors import ImageError  # noqa: E402
from tidewheel.engine.media.frames import Frames, sampled  # noqa: E402
from tidewheel.engine.media.media import Media, MediaFiles, Modality  # noqa: E402
from tidewheel.engine.media.pixels import frames_of  # noqa: E402
from tidewheel.engine.media.reader import MediaReader  # noqa: E402

SETTINGS = DecodeSettings(2**16, max_frames=8)
PICTURES = [colors(40, 30, seed=seed) for seed in range(6)]


def animation(name: str, pictures: Sequence[Image.Image] = PICTURES, **options: Any) -> bytes:
    lossless = {"lossless": True} if name == "WEBP" else {}
    return saved(pictures[0], name, save_all=True, append_images=pictures[1:], **lossless, **options)


def frames(*files: bytes, fps: float = 1.0, settings: DecodeSettings = SETTINGS) -> Frames:
    return frames_of(MediaFiles(files, "video", fps), settings)


def pixels_of(found: Frames) -> list[NDArray[np.uint8]]:
    return [picture.pixels for picture in [*found.pictures]]  # each keeps its own when the next one is read


@pytest.mark.parametrize("name", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_its_pictures_at_their_times(name: str) -> None:
    data = animation(name, duration=500)
    found = frames(data)
    assert (found.height, found.width, found.fps) == (30, 40, 2.0)
    assert found.seconds == pytest.approx((0.0, 0.5, 1.0, 1.5, 2.0, 2.5))
    for picture, pixels in zip(PICTURES, pixels_of(found), strict=True):
        wanted = np.asarray(picture)
        if name == "GIF":  # which has 256 colours
            assert np.abs(pixels.astype(int) - wanted).mean() < 40
        else:
            np.testing.assert_array_equal(pixels, wanted)


def test_pictures_are_shown_as_long_as_they_say_and_as_in_browsers() -> None:
    data = animation("GIF", duration=[200, 0, 10, 1000, 50, 100])
    found = frames(data, settings=DecodeSettings(2**16, fps=100.0))
    assert found.seconds == pytest.approx((0.0, 0.2, 0.3, 0.4, 1.4, 1.45))
    assert found.fps == pytest.approx(6 / 1.55)


def test_some_frames_are_taken_of_many() -> None:
    """Two in a second, and no more than the settings say."""
    pictures = [colors(8, 8, seed=seed) for seed in range(40)]
    data = animation("PNG", pictures, duration=100)
    found = frames(data)
    chosen = sampled(40, 4.0, 2.0, 8)
    assert len(chosen) == 8
    assert found.seconds == pytest.approx([0.1 * index for index in chosen])
    for index, pixels in zip(chosen, pixels_of(found), strict=True):
        np.testing.assert_array_equal(pixels, np.asarray(pictures[index]))
    assert len(frames(data, settings=DecodeSettings(2**16, max_frames=3)).seconds) == 3
    assert len(frames(data, settings=DecodeSettings(2**16, max_frames=50, fps=5.0)).seconds) == 20


def test_clear_pixels_of_frames_are_on_the_background() -> None:
    clear = [Image.new("RGBA", (8, 8), (level, 0, 0, 0)) for level in (10, 200)]
    settings = DecodeSettings(2**16, background=(1, 2, 3))
    found = pixels_of(frames(animation("PNG", clear, duration=100, disposal=1), settings=settings))
    assert all((pixels == (1, 2, 3)).all() for pixels in found)


def test_a_picture_is_a_video_of_one_frame() -> None:
    found = frames(png())
    assert (len(found.seconds), len([*found.pictures])) == (1, 1)


def test_files_are_frames() -> None:
    files = [saved(picture, "PNG") for picture in PICTURES] * 2
    found = frames(*files, fps=4.0)
    assert found.seconds == pytest.approx([index / 4 for index in (0, 2, 3, 5, 6, 8, 9, 11)])
    assert found.fps == pytest.approx(8 / 12 * 4)
    np.testing.assert_array_equal(pixels_of(found)[1], np.asarray(PICTURES[2]))


def with_a_larger_picture() -> bytes:
    """A GIF whose second picture is wider than it says of all of them, and than any may be."""
    data = bytearray(animation("GIF", PICTURES[:2]))
    at = data.rindex(struct.pack("<BHHHH", 0x2C, 0, 0, 40, 30)) + 5
    data[at : at + 2] = struct.pack("<H", 60_000)
    return bytes(data)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ((png(40, 30), png(30, 40)), "frame 1 has 30 x 40 pixels, and the first one 40 x 30"),
        ((with_a_larger_picture(),), "frame 1 has 60000 x 30 pixels, and the first one 40 x 30"),
        ((png(40, 30), b"GIF89a"), "damaged or incomplete"),
        ((png(300, 300), png(300, 300)), "300 x 300 pixels, and 65536 are the most"),
        ((animation("GIF")[:-200],), "damaged or incomplete"),
        ((animation("GIF", [colors(2, 2, seed=i) for i in range(769)], duration=100),), "769 frames, and 768 are"),
        ((animation("PNG", duration=[65000] * 6) * 1,), None),
        ((animation("WEBP", PICTURES[:2], duration=16_000_000),), None),
        ((animation("WEBP", duration=16_000_000),), "takes 96000 s, and 86400 are the most"),
    ],
)
def test_bounds_of_frames(files: tuple[bytes, ...], reason: str | None) -> None:
    if reason is None:
        assert len([*frames(*files).pictures]) > 1
        return
    with pytest.raises(ImageError, match=reason):
        [*frames(*files).pictures]


IDS: dict[Modality, int] = {"image": 7, "video": 8}


@pytest.fixture(scope="module")
def reader() -> Iterator[MediaReader]:
    made = MediaReader(TinyVideos(), IDS, settings=SETTINGS, cache_bytes=2**20, max_bytes=100_000)
    yield made
    made.close()


def read(reader: MediaReader, *files: bytes, fps: float = 1.0) -> Media:
    return asyncio.run(reader.read(MediaFiles(files, "video", fps), "where"))


def test_a_video_is_read(reader: MediaReader) -> None:
    media = read(reader, *(saved(picture, "PNG") for picture in PICTURES[:3]), fps=2.0)
    assert (media.modality, media.layout, media.num_tokens) == ("video", ("video", (0.0, 0.5, 1.0)), 6)
    assert (media.width, media.height) == (40, 30)
    for tile, picture in zip(media.tiles, PICTURES[:3], strict=True):
        np.testing.assert_array_equal(tile, np.asarray(picture))


def test_what_is_kept_of_videos_is_theirs_alone(reader: MediaReader) -> None:
    """The same files are another video at another pace, and as one image."""
    files = [saved(picture, "PNG") for picture in PICTURES[3:5]]
    once, faster = read(reader, *files), read(reader, *files, fps=4.0)
    assert read(reader, *files) is once
    assert once.digest != faster.digest
    alone = read(reader, files[0])
    image = asyncio.run(reader.read(MediaFiles((files[0],)), "where"))
    assert (alone.modality, image.modality) == ("video", "image")
    assert alone.digest != image.digest


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ((b"\0\0\0\x20ftypisom",), "where cannot be read as a video: it is a video; videos are sent as their frames"),
        ((png(), b"%PDF-1.7"), "where cannot be read as a video: it is a PDF file"),
        ((png(REFUSES, 8), png(REFUSES, 8)), "where cannot be read as a video: it has an unlucky width"),
        ((png(40, 30), png(30, 40)), "frame 1 has 30 x 40 pixels"),
        ((png() + bytes(60_000),) * 2, r"where is a video of \d+ bytes; 100000 are the most"),
    ],
)
def test_errors_name_the_field(reader: MediaReader, files: tuple[bytes, ...], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        read(reader, *files)


def test_images_and_videos_have_their_own_places(reader: MediaReader) -> None:
    image = asyncio.run(reader.read(MediaFiles((png(3, 2),)), "where"))
    media = read(reader, *(saved(picture, "PNG") for picture in PICTURES[:2]))
    expanded = reader.expand("a<video>b<image>c", [image, media], "prompt")
    assert expanded.text == "a0:<frame>1:<frame>b[<pad>|<pad>]c"
    ids, spans = reader.spread([1, 8, 2, 8, 3, 7, 4, 7, 5], expanded)
    assert ids == [1, 8, 8, 2, 8, 8, 3, 7, 7, 4, 7, 7, 7, 5]
    assert [(span.media.modality, span.start, span.length, span.first_row) for span in spans] == [
        ("video", 1, 2, 0),
        ("video", 4, 2, 2),
        ("image", 7, 2, 0),
        ("image", 10, 3, 2),
    ]
    with pytest.raises(InvalidRequestError, match="contains '<frame>' besides"):
        reader.spread([1, 8, 2, 8, 3, 7, 4, 7, 8], expanded)
    with pytest.raises(InvalidRequestError, match="1 videos, of which the model's chat template shows 0"):
        reader.expand("b<image>c", [image, media], "prompt")
    with pytest.raises(InvalidRequestError, match="contains '<video>' besides"):
        reader.expand("<video>b<image>c<video>", [image, media], "prompt")
