"""The file formats of images, told by their first bytes: what a decoder is chosen by, and what is refused by name."""

from __future__ import annotations

import re

from .errors import ImageError
from .media import Modality

# What a client calls it does not count: a decoder is only given what begins as its format does.
_DECODED = (
    ("JPEG", re.compile(rb"\xff\xd8\xff")),
    ("PNG", re.compile(rb"\x89PNG\r\n\x1a\n")),
    ("GIF", re.compile(rb"GIF8[79]a")),
    ("WEBP", re.compile(rb"RIFF....WEBP", re.DOTALL)),
    ("BMP", re.compile(rb"BM")),
)
_REFUSED = (
    ("an SVG drawing", re.compile(rb"(\xef\xbb\xbf)?\s*<(svg|\?xml|!DOCTYPE svg)", re.IGNORECASE)),
    ("a web page", re.compile(rb"(\xef\xbb\xbf)?\s*<(html|!DOCTYPE html|head|body)", re.IGNORECASE)),
    ("a PDF file", re.compile(rb"%PDF-")),
    ("a TIFF image", re.compile(rb"II[\x2a\x2b]\0|MM\0[\x2a\x2b]")),
    ("an AVIF image", re.compile(rb"....ftypavi[fs]", re.DOTALL)),
    ("a HEIC image", re.compile(rb"....ftyp(hei|hev|mif1|msf1)", re.DOTALL)),
    ("a video", re.compile(rb"....ftyp|\x1a\x45\xdf\xa3|RIFF....AVI ", re.DOTALL)),
    ("a JPEG XL image", re.compile(rb"\xff\x0a|\0\0\0\x0cJXL ")),
    ("a JPEG 2000 image", re.compile(rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51")),
    ("an icon", re.compile(rb"\0\0[\1\2]\0[\1-\xff]")),
    ("a Photoshop file", re.compile(rb"8BPS")),
    ("base64 of an image", re.compile(rb"/9j/|iVBORw0KGgo|R0lGOD|UklGR|data:")),
)

FORMATS = tuple(name for name, _ in _DECODED)
"""Pillow's names of the formats that are decoded."""


_TAKEN: dict[Modality, str] = {
    "image": "images may be JPEG, PNG, GIF, WebP or BMP files",
    "video": "videos are sent as their frames: a list of images, or an animated GIF, WebP or PNG file",
}


def image_format(data: bytes, wanted: Modality = "image") -> str:
    """Which of FORMATS a file is in. Raises ImageError, which says what it is instead, and what is `wanted`."""
    for name, start in _DECODED:
        if start.match(data):
            return name
    if not data:
        raise ImageError("it is empty")
    found = next((name for name, start in _REFUSED if start.match(data)), "of no known format")
    raise ImageError(f"it is {found}; {_TAKEN[wanted]}")
