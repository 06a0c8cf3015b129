"""Harnesses of images in requests: files, and the URLs that name them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
from importlib.util import find_spec
from typing import Any

import numpy as np
from fuzz.harness import Harness

from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.media.decode_settings import DecodeSettings
from tidewheel.engine.media.errors import ImageError
from tidewheel.engine.media.fetching import MediaFetcher
from tidewheel.engine.media.media import MediaFiles

MAX_PIXELS = 2**20


def image(data: bytes) -> None:
    with contextlib.suppress(ImageError):
        height, width, colors = decoders()(data, DecodeSettings(MAX_PIXELS)).pixels.shape
        assert 0 < height * width <= MAX_PIXELS
        assert colors == 3


def video(data: bytes) -> None:
    with contextlib.suppress(ImageError):
        decoders()
        from tidewheel.engine.media.pixels import frames_of

        found = frames_of(MediaFiles((data,), "video"), DecodeSettings(MAX_PIXELS, max_frames=4))
        pictures = [*found.pictures]
        assert 0 < len(pictures) == len(found.seconds) <= 4
        assert {picture.pixels.shape for picture in pictures} == {(found.height, found.width, 3)}
        assert [*found.seconds] == sorted(found.seconds)
        assert found.fps > 0


@functools.cache
def decoders() -> Any:
    from tidewheel.engine.media.pixels import import_decoders, picture_of

    import_decoders()
    return picture_of


def video_seeds() -> list[bytes]:
    from PIL import Image

    seeds = []
    pictures = [
        Image.fromarray(colors) for colors in np.random.default_rng(0).integers(0, 256, (5, 9, 11, 4), np.uint8)
    ]
    for name, mode in (("GIF", "P"), ("PNG", "RGBA"), ("WEBP", "RGBA")):
        first, *others = [picture.convert("RGB").convert(mode) for picture in pictures]
        file = io.BytesIO()
        first.save(file, name, save_all=True, append_images=others, duration=[200, 0, 900, 30, 100])
        seeds.append(file.getvalue())
    return seeds


def image_seeds() -> list[bytes]:
    from PIL import Image

    seeds = []
    colors = np.random.default_rng(0).integers(0, 256, (9, 11, 4), np.uint8)
    exif = Image.Exif()
    exif[0x112] = 6
    for name, mode in [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGBA"), ("PNG", "P"), ("GIF", "P"), ("WEBP", "RGBA"),
                       ("BMP", "RGB")]:  # fmt: skip
        picture = Image.fromarray(colors).convert("RGB").convert(mode)
        file = io.BytesIO()
        picture.save(file, name, **({"exif": exif} if name in ("JPEG", "PNG", "WEBP") else {}))
        seeds.append(file.getvalue())
    return seeds


def image_url(data: bytes) -> None:
    asked = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return ["10.0.0.1"]

    fetcher = MediaFetcher(
        allowed_domains=["example.org", "[2a00::1]", "example.org:81"],
        allowed_local_path="/nonexistent",
        max_bytes=1000,
        resolve=resolve,
    )
    said = ""
    try:
        content = asyncio.run(fetcher.fetch(data.decode("utf-8", "replace"), "url"))
        assert len(content) <= 1000
    except InvalidRequestError as error:
        said = str(error)
    finally:
        fetcher.close()
    assert "10.0.0.1" not in said
    assert "nonexistent" not in said
    assert set(asked) <= {(host, port) for host in ("example.org", "2a00::1") for port in (80, 443, 81)}


URLS = [
    b"https://example.org/a.png?b=c#d", b"http://example.org:81/", b"http://user@example.org\\@a/", b"https://[2a00::1]",
    b"data:image/png;a=b;base64,aW1h\r\nZ2U=", b"file:///nonexistent/a%20b.png", b"file://localhost/a", b"ftp://a",
]  # fmt: skip

IMAGES = {"image-url": Harness(image_url, URLS)}
if find_spec("PIL") is not None:  # not there on every machine
    IMAGES["image"] = Harness(image, image_seeds())
    IMAGES["video"] = Harness(video, video_seeds())
