"""The process that decodes images and prepares them for a model. An image may crash it without harm to the server.

For each image a process is forked that has limits of time and memory, and can open no files and no connections.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import resource
import socket
import traceback
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..sandboxing.process import ANSWER, Outcome, bound_process, receive_message, serve
from .errors import ImageError
from .layouts import plain_layout

if TYPE_CHECKING:
    from .vision import Vision

    Prepared = tuple[Vision, int]  # and the most pixels of an image

MAX_CPU_S = 10  # the largest images that are allowed take one to three
MAX_WALL_S = 60
_NICE = 5  # below the steps of all requests, but the first token of this one waits for it
_BYTES_PER_PIXEL = 16  # Pillow has 4, twice while an image is turned; resizing has copies of its own
_SPARE_BYTES = 256 * 2**20
_MAX_TEXT = 4096

FAILED = 1  # the number that goes with REFUSED if the text is a traceback, because the mistake is ours
COMMAND = "import sys; sys.path[:] = sys.argv[2:]; from tidewheel.engine.media.decoding_process import main; main()"


def max_memory_bytes(max_pixels: int) -> int:
    """What decoding an image may take, if images may have this many pixels."""
    return _BYTES_PER_PIXEL * max_pixels + _SPARE_BYTES


def main() -> None:
    """Serve on the socket that the command line names, until its other end is closed."""
    serve(_prepared, _decode, wall_s=MAX_WALL_S, niceness=_NICE)


def _prepared(state: bytes) -> Prepared:
    from .pixels import import_decoders  # the server imports this module too, and never Pillow

    vision, max_pixels = pickle.loads(state)
    import_decoders()
    with contextlib.suppress(Exception):  # a model need not take such a small image
        vision.process(np.zeros((64, 64, 3), np.uint8))  # imports what it needs, once for all images
    return vision, max_pixels


def _decode(connection: socket.socket, prepared: Prepared) -> None:
    vision, max_pixels = prepared
    data = receive_message(connection)
    _bound_process(max_pixels)
    tiles: tuple[NDArray[np.uint8], ...] = ()
    outcome, number = Outcome.REFUSED, 0
    try:
        tiles, text = _decoded(vision, data, max_pixels)
        outcome = Outcome.RESULT
    except ImageError as error:
        text = str(error)[:_MAX_TEXT]
    except MemoryError:
        text = f"it takes more than {max_memory_bytes(max_pixels) >> 20} MiB of memory"
    except Exception:
        text, number = traceback.format_exc()[-_MAX_TEXT:], FAILED
    content = text.encode(errors="replace")
    connection.sendall(ANSWER.pack(outcome, number, len(content)) + content)
    for tile in tiles:
        connection.sendall(tile.data)


def _bound_process(max_pixels: int) -> None:
    bound_process(MAX_CPU_S, max_memory_bytes(max_pixels), MAX_WALL_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # whatever an image makes a decoder do, it opens nothing


def _decoded(vision: Vision, data: bytes, max_pixels: int) -> tuple[tuple[NDArray[np.uint8], ...], str]:
    """The tiles, and in JSON the image's width and height, the tiles' shapes, and the layout."""
    from .pixels import pixels_of

    pixels = pixels_of(data, max_pixels)
    height, width = pixels.shape[:2]
    try:
        tiles, layout = vision.process(pixels)
    except ValueError as error:
        raise ImageError(str(error)) from error
    for tile in tiles:
        if tile.dtype != np.uint8 or tile.ndim != 3 or tile.shape[2] != 3:
            raise TypeError(f"a tile is {tile.dtype} {tile.shape}")
    head = json.dumps([width, height, [tile.shape[:2] for tile in tiles], plain_layout(layout)])
    return tuple(np.ascontiguousarray(tile) for tile in tiles), head
