"""Packed weights kept on disk, so that the next start does not pack, quantize or read the checkpoint again.

A file holds the packed weights of one model in one format for one ISA level in this machine's byte order. Its key says
all of that. Files that cannot be used are ignored, and failures to write are logged: a cache never keeps a model from
loading. Files are read into memory and not mapped, because memory can have huge pages. These make decoding up to a
sixth faster.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from ..start_log import start_logger

logger = logging.getLogger(__name__)

_MAGIC = b"tidewheel pack 1"
_HEADER = struct.Struct("<16s32sQQ")  # magic, key, bytes of weights, their checksum; a CRC-32 of all that follows
_CRC = struct.Struct("<I")
_WEIGHTS_AT = 4096  # bytes
_CHUNK = 8 << 20  # bytes written at once


class PackedWeights(Protocol):
    """A device's packed weights: the native executor's side of the cache. `_native.pyi` has the same names.

    Its runs follow each other in the file. The file's content does not depend on how the weights are divided into runs.
    """

    def packed_weights(self) -> Sequence[NDArray[np.uint8]]: ...
    def weights_checksum(self) -> int: ...
    def read_weights(self, file: int, offset: int, checksum: int) -> bool: ...


class PackedCache:
    """The file in `folder` for what `facts` describe. Facts are JSON, and equal only for equal packed weights."""

    def __init__(self, folder: str, facts: Sequence[object]) -> None:
        self._key = hashlib.sha256(json.dumps([sys.byteorder, *facts]).encode()).digest()
        self.path = Path(folder).expanduser() / f"{self._key.hex()[:32]}.packed"

    def read(self, weights: PackedWeights) -> bool:
        """Fill `weights` from the file. False if there is no usable file; then `weights` stay as they were."""
        try:
            with open(self.path, "rb", opener=_without_waiting) as file:
                checksum = self._read_header(file, _num_bytes(weights))
                if not weights.read_weights(file.fileno(), _WEIGHTS_AT, checksum):
                    raise ValueError("its checksum does not match its weights")
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as error:
            logger.warning("The packed weights in %s cannot be used and will be replaced: %s", self.path, error)
            return False
        start_logger.info("Loaded packed weights from %s", self.path)
        return True

    def write(self, weights: PackedWeights, stopped: threading.Event) -> None:
        """Write the file unless `stopped` is set meanwhile. What goes wrong is logged, never raised.

        The file appears whole or not at all. Of several processes that want to write it, one does.
        """
        started = time.perf_counter()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._write(weights, stopped):
                seconds = time.perf_counter() - started
                start_logger.info("Kept packed weights for the next start in %s (%.2f s)", self.path, seconds)
        except OSError as error:
            logger.warning("The packed weights could not be kept for the next start: %s", error)

    def _read_header(self, file: BinaryIO, num_bytes: int) -> int:
        """The checksum of the weights that follow. Raises ValueError if this is not the file it should be."""
        header, crc = file.read(_HEADER.size), file.read(_CRC.size)
        if len(header) != _HEADER.size or crc != _CRC.pack(zlib.crc32(header)):
            raise ValueError("its header is damaged or of another kind of file")
        magic, key, length, checksum = _HEADER.unpack(header)
        if (magic, key, length) != (_MAGIC, self._key, num_bytes):
            raise ValueError("it holds other weights")
        if os.fstat(file.fileno()).st_size != _WEIGHTS_AT + length:  # only regular files have a length
            raise ValueError("it is not as long as it should be")
        return int(checksum)

    def _write(self, weights: PackedWeights, stopped: threading.Event) -> bool:
        # There is one temporary file a key, which a writer locks: what a killed one leaves is used up by the next.
        temporary = self.path.with_suffix(".tmp")
        # To append: opening it must not harm what another writes.
        with open(temporary, "ab", buffering=0, opener=_without_waiting) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(file.fileno()), temporary.stat()):
                    return False  # it was finished, and renamed, before it could be locked
            except (BlockingIOError, FileNotFoundError):
                return False
            try:
                file.truncate(0)
                header = _HEADER.pack(_MAGIC, self._key, _num_bytes(weights), weights.weights_checksum())
                header += _CRC.pack(zlib.crc32(header))
                _write_all(file, memoryview(header.ljust(_WEIGHTS_AT, b"\0")))
                for chunk in _chunks(weights):
                    if stopped.is_set():
                        temporary.unlink()
                        return False
                    _write_all(file, chunk)
                os.fsync(file.fileno())
                temporary.replace(self.path)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
        return True


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)  # a pipe in the file's place is an error, not a reason to wait


def _num_bytes(weights: PackedWeights) -> int:
    return sum(run.nbytes for run in weights.packed_weights())


def _chunks(weights: PackedWeights) -> Iterator[memoryview]:
    for run in weights.packed_weights():
        for start in range(0, run.nbytes, _CHUNK):
            yield run.data[start : start + _CHUNK]


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


class BackgroundWrite:
    """Writes to a cache in a thread of its own: a start does not wait for the disk."""

    def __init__(self, cache: PackedCache, weights: PackedWeights) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=cache.write, args=(weights, self._stopped), name="packed-cache", daemon=True
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it is not done yet."""
        return self._thread.is_alive()

    def cancel(self) -> None:
        """Give up what is not written yet, and wait until the weights are no longer in use."""
        self._stopped.set()
        self._thread.join()
