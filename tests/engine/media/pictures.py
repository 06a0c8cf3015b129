"""Image files of all kinds, for tests."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tidewheel.engine.media.picture import Picture
from tidewheel.engine.media.vision import Vision


def saved(image: Image.Image, name: str, **options: Any) -> bytes:
    """A file of an image in one of Pillow's formats."""
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def colors(width: int = 37, height: int = 23, channels: int = 3, seed: int = 0) -> Image.Image:
    """A picture of smooth colors."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, channels), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)


def png(width: int = 37, height: int = 23, seed: int = 0) -> bytes:
    """A PNG file of `colors`."""
    return saved(colors(width, height, seed=seed), "PNG")


def png_chunk(kind: bytes, content: bytes) -> bytes:
    """A part of a PNG file."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(width: int, height: int, data: bytes, depth: int = 8, color: int = 2) -> bytes:
    """A PNG file that states any size, with `data` as its compressed rows."""
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    parts = (png_chunk(b"IHDR", head), png_chunk(b"IDAT", data), png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def zeros(size: int) -> bytes:
    """`size` zeros as zlib compresses them, made without having them all."""
    packer = zlib.compressobj(9)
    pieces = [packer.compress(bytes(min(2**20, size - at))) for at in range(0, size, 2**20)]
    return b"".join([*pieces, packer.flush()])


def processed_by(vision: Vision, image: NDArray[np.uint8]) -> tuple[tuple[NDArray[np.uint8], ...], Hashable]:
    """The tiles and the layout that a vision makes of an image `[height, width, 3]`."""
    tiles, layout = vision.process(Picture(image))
    return tuple(tile.pixels for tile in tiles), layout
