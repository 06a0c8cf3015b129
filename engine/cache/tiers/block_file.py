"""A KV block in a file: a header that says whose content it is, and the block's bytes behind a checksum."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..identity import Digest

_MAGIC = b"tidewheel kv 001"
_HEADER = struct.Struct("<16s16s16sQI")  # magic, the model's identity, the block's digest, its bytes, their CRC-32
_CRC = struct.Struct("<I")  # of the header
HEADER_BYTES = _HEADER.size + _CRC.size
_MODE = 0o600  # what people have written can be guessed from K and V


class BadFileError(Exception):
    """A file that is not the block that its name says, or not all of it."""


def write_block(path: Path, identity: bytes, digest: Digest, data: NDArray[np.uint8]) -> None:
    """Write a block to a file that may be there already. Raises OSError.

    Nothing waits for the disk: a file that a crash of the machine has left incomplete does not fit its checksum.
    """
    header = _HEADER.pack(_MAGIC, identity, digest, data.nbytes, zlib.crc32(data.data))
    header += _CRC.pack(zlib.crc32(header))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    try:
        for part in (memoryview(header), data.data):
            while part:
                part = part[os.write(file, part) :]
    finally:
        os.close(file)


def read_block(path: Path, identity: bytes, digest: Digest, data: NDArray[np.uint8]) -> None:
    """Fill `data` from a file. Raises BadFileError, with any bytes in `data`, and OSError."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe in its place is no reason to wait
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise BadFileError("it is a link or a socket") from None
        if error.errno == errno.EACCES:
            raise BadFileError("it may not be read") from None
        raise
    try:
        if os.fstat(file).st_size != HEADER_BYTES + data.nbytes:
            raise BadFileError("its length is not that of a block")
        header = os.read(file, HEADER_BYTES)
        if len(header) != HEADER_BYTES or header[_HEADER.size :] != _CRC.pack(zlib.crc32(header[: _HEADER.size])):
            raise BadFileError("its header is damaged")
        magic, model, block, length, checksum = _HEADER.unpack(header[: _HEADER.size])
        if (magic, model, block, length) != (_MAGIC, identity, digest, data.nbytes):
            raise BadFileError("it holds something else")
        rest = data.data
        while rest:
            count = os.readv(file, [rest])
            if count == 0:
                raise BadFileError("it has become shorter")
            rest = rest[count:]
        if zlib.crc32(data.data) != checksum:
            raise BadFileError("its content does not match its checksum")
    finally:
        os.close(file)
