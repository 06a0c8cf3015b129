"""ImageDecoder: files in, images as a model's tower takes them out. They are decoded in processes of their own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import pickle
import signal
import socket
import struct
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from ..cancellation import Cancellation
from ..sandboxing.process import Outcome
from ..sandboxing.sandbox import LostError, Sandbox, ask
from .decode_settings import DecodeSettings
from .decoding_process import COMMAND, FAILED, MAX_CPU_S, MAX_WALL_S, task_of
from .errors import ImageError
from .formats import image_format
from .layouts import layout_of
from .media import Media, MediaFiles
from .vision import Vision

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_MAX_TILES = 4096
_MAX_TILE_BYTES = 256 * 2**20  # of all tiles of an image
_PIECE_BYTES = 2**20  # received by a call
_TIMEVAL = struct.Struct("ll")

# Pixels that were never written before come in small pages otherwise, which takes a fifth of the time.
_HUGE_PAGES: Mapping[str, str] = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

_ENDS: Mapping[int, str] = {
    signal.SIGXCPU: f"decoding it takes more than {MAX_CPU_S} s of processor time",
    signal.SIGALRM: f"decoding it takes longer than {MAX_WALL_S} s",
}


class ImageDecoder:
    """Decodes images, several at once, each in a process of its own with limits of time and memory.

    The process that forks them starts with the first image, and again after a crash. May be used from several threads.
    """

    def __init__(self, vision: Vision, settings: DecodeSettings) -> None:
        """`vision` is pickled. Images with too many pixels are refused before these are decoded."""
        self._vision = vision
        self._has_pillow = find_spec("PIL") is not None  # not there on every machine
        self._sandbox = Sandbox(
            lambda: COMMAND, lambda: pickle.dumps((vision, settings)), "decodes images", _HUGE_PAGES
        )

    def require(self, sent: MediaFiles) -> None:
        """Raises ImageError for a file that need not be decoded to tell that it is no image, or if nothing can be."""
        for data in sent.files:
            image_format(data, sent.modality)
        if not self._has_pillow:
            raise ImageError("this server has no Pillow, which decodes images; install it with: pip install pillow")

    def decode(self, sent: MediaFiles, cancellation: Cancellation, vision: Vision | None = None) -> Media:
        """The image or the video in files, as the model's processor makes it. Its pixels cannot be changed.

        With a `vision`, its processor is taken: the model's own with other settings, which decide sizes alone. Raises
        ImageError, SandboxError if no image can be decoded at the moment, and LoadCancelledError.
        """

        def decoded(connection: socket.socket) -> Media:
            with cancellation.calling(lambda: _shut(connection)):
                try:
                    return self._decoded(connection, sent, vision)
                except (OSError, EOFError):
                    cancellation.check()
                    raise

        return self._sandbox.run(decoded)

    def close(self) -> None:
        """End the processes. Those who wait get an error at once."""
        self._sandbox.close()

    def _decoded(self, connection: socket.socket, sent: MediaFiles, vision: Vision | None) -> Media:
        answer = ask(connection, task_of(sent, vision), MAX_WALL_S, lambda: None)
        if answer.outcome == Outcome.ENDED:
            raise _error_of(answer.number)
        text = answer.content.decode(errors="replace")
        if answer.outcome == Outcome.REFUSED:
            if answer.number != FAILED:
                raise ImageError(text)
            logger.error("The model's image processor has failed:\n%s", text)
            raise ImageError("the model's image processor has failed")
        try:
            width, height, shapes, plain = json.loads(text)
            layout = layout_of(plain)
            tiles, digest = _received(connection, shapes, (layout, (vision or self._vision).settings))
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise ImageError("its decoder has failed") from error
        return Media(tiles, layout, self._vision.num_tokens(layout), digest, width, height, sent.modality)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end was faster
        connection.shutdown(socket.SHUT_RDWR)


def _received(
    connection: socket.socket, shapes: Sequence[Sequence[int]], named: Hashable
) -> tuple[tuple[NDArray[np.uint8], ...], bytes]:
    """The tiles that come next, of these heights and widths, and the digest of them and of what is `named`.

    The digest is made here and not by the decoder: an image that has taken it over could choose that of another.
    Raises ValueError if the tiles would be too large.
    """
    sizes = [3 * math.prod((int(height), int(width))) for height, width in shapes]
    if len(sizes) > _MAX_TILES or min(sizes, default=0) < 0 or sum(sizes) > _MAX_TILE_BYTES:
        raise ValueError("too many pixels")
    tiles = tuple(np.empty((height, width, 3), np.uint8) for height, width in shapes)
    digest = hashlib.sha256(repr(([tile.shape for tile in tiles], named)).encode())
    # A call receives a piece without Python's lock. With Python's own timeout it would take the lock for each 200 KB,
    # and wait for it each time while the event loop is busy.
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(MAX_WALL_S, 0))
    with ThreadPoolExecutor(1, "image-digest") as digesting:  # what has come, while more is received
        for tile in tiles:
            rest = tile.reshape(-1).data
            while rest:
                received = connection.recv_into(rest, min(len(rest), _PIECE_BYTES), socket.MSG_WAITALL)
                if not received:
                    raise EOFError
                digesting.submit(digest.update, rest[:received])
                rest = rest[received:]
            tile.flags.writeable = False
    return tiles, digest.digest()


def _error_of(status: int) -> Exception:
    """Why decoding has ended without an answer, by its wait status."""
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by in (signal.SIGKILL, signal.SIGTERM):
        return LostError("the process that decoded it was killed: the machine may be out of memory")
    return ImageError(_ENDS.get(ended_by, "its decoder has failed"))
