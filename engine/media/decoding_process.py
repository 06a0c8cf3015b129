"""The process that decodes images and prepares them for a model. An image may crash it without harm to the server.

For each image a process is forked that has limits of time and memory, and can open no files and no connections.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import resource
import socket
import struct
import traceback
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..sandboxing.process import ANSWER, Outcome, bound_process, receive_message, serve
from .decode_settings import DecodeSettings
from .errors import ImageError
from .layouts import plain_layout
from .media import MediaFiles, Modality
from .picture import Picture

if TYPE_CHECKING:
    from .vision import Vision

    Prepared = tuple[Vision, DecodeSettings]

MAX_CPU_S = 10  # the largest images that are allowed take one to three
MAX_WALL_S = 60
_NICE = 5  # below the steps of all requests, but the first token of this one waits for it
_BYTES_PER_PIXEL = 16  # Pillow has 4, twice while an image is turned; resizing has copies of its own
_SPARE_BYTES = 256 * 2**20
_MAX_TEXT = 4096
_HEAD = struct.Struct("!Q")

FAILED = 1  # the number that goes with REFUSED if the text is a traceback, because the mistake is ours
COMMAND = "import sys; sys.path[:] = sys.argv[2:]; from tidewheel.engine.media.decoding_process import main; main()"


class _Task(NamedTuple):
    """What becomes of the files that follow it; without a vision, the model's own processes them."""

    sizes: tuple[int, ...]
    modality: Modality
    fps: float
    vision: Vision | None


def task_of(sent: MediaFiles, vision: Vision | None) -> bytes:
    """The message that has these files decoded; a `vision` takes the place of the model's own."""
    head = pickle.dumps(_Task(tuple(map(len, sent.files)), sent.modality, sent.fps, vision))
    return b"".join((_HEAD.pack(len(head)), head, *sent.files))


def max_memory_bytes(max_pixels: int) -> int:
    """What decoding an image may take, if images may have this many pixels."""
    return _BYTES_PER_PIXEL * max_pixels + _SPARE_BYTES


def main() -> None:
    """Serve on the socket that the command line names, until its other end is closed."""
    serve(_prepared, _decode, wall_s=MAX_WALL_S, niceness=_NICE)


def _prepared(state: bytes) -> Prepared:
    from .pixels import import_decoders  # the server imports this module too, and never Pillow

    vision, settings = pickle.loads(state)
    import_decoders()
    with contextlib.suppress(Exception):  # a model need not take such a small image
        vision.process(Picture(np.zeros((64, 64, 3), np.uint8)))  # imports what it needs, once for all images
    return vision, settings


def _decode(connection: socket.socket, prepared: Prepared) -> None:
    vision, settings = prepared
    message = receive_message(connection)
    begin = _HEAD.size + _HEAD.unpack_from(message)[0]
    task: _Task = pickle.loads(message[_HEAD.size : begin])  # from the server; what the client sent follows
    files = []
    for size in task.sizes:
        files.append(message[begin : begin + size])
        begin += size
    del message
    _bound_process(settings.max_pixels)
    tiles: tuple[Picture, ...] = ()
    outcome, number = Outcome.REFUSED, 0
    try:
        sent = MediaFiles(tuple(files), task.modality, task.fps)
        tiles, text = _decoded(task.vision or vision, sent, settings)
        outcome = Outcome.RESULT
    except ImageError as error:
        text = str(error)[:_MAX_TEXT]
    except MemoryError:
        text = f"it takes more than {max_memory_bytes(settings.max_pixels) >> 20} MiB of memory"
    except Exception:
        text, number = traceback.format_exc()[-_MAX_TEXT:], FAILED
    content = text.encode(errors="replace")
    connection.sendall(ANSWER.pack(outcome, number, len(content)) + content)
    for tile in tiles:
        for strip in tile.strips():  # the server receives and digests one while the next is made
            connection.sendall(strip)


def _bound_process(max_pixels: int) -> None:
    bound_process(MAX_CPU_S, max_memory_bytes(max_pixels), MAX_WALL_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # whatever an image makes a decoder do, it opens nothing


def _decoded(vision: Vision, sent: MediaFiles, settings: DecodeSettings) -> tuple[tuple[Picture, ...], str]:
    """The tiles, and in JSON the image's width and height, the tiles' shapes, and the layout."""
    from .pixels import frames_of, picture_of

    try:
        if sent.modality == "video":
            frames = frames_of(sent, settings)
            height, width = frames.height, frames.width
            tiles, layout = vision.process_video(frames)
        else:
            picture = picture_of(sent.files[0], settings)
            height, width = picture.shape[:2]
            tiles, layout = vision.process(picture)
    except ValueError as error:
        raise ImageError(str(error)) from error
    head = json.dumps([width, height, [tile.shape[:2] for tile in tiles], plain_layout(layout)])
    return tiles, head
