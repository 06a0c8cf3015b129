"""Copies of files in memory, for files that may be written meanwhile.

If another process cuts a mapped file short, a signal ends the process that reads it.
"""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path
from typing import BinaryIO

from ..errors import ModelError
from .reading import require_file
from .unnamed import unnamed_file


class FileCopy:
    """What a file held at one moment.

    `content` is a mapping of the copy, which stays, or empty bytes for an empty file. `version` names the original's
    content without reading it: its path, bytes, last change of content and of inode in ns.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelError for no regular file, an empty one, and one that changes while it is copied."""
        if not require_file(path):  # files of the system have no size either, and some have no end
            raise ModelError(f"{path} is empty")
        try:
            with (
                os.fdopen(unnamed_file(), "w+b") as copy,
                open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as original,
            ):
                before = _version(path, original.fileno())
                shutil.copyfileobj(_Beginning(original, before[1]), copy, 1 << 20)
                copy.flush()
                after = _version(path, original.fileno())
                size = os.fstat(copy.fileno()).st_size
                self.content: bytes | mmap.mmap = mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
        if before != after or size != before[1] or not _is_still(path, before):
            raise ModelError(f"{path} changed while it was read; load it again when it is complete")
        self.version = before


class _Beginning:
    """As many bytes of a file as it is said to have, since some have no end."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file = file
        self._left = left

    def read(self, size: int = -1, /) -> bytes:
        piece = self._file.read(self._left if size < 0 else min(size, self._left)) or b""
        self._left -= len(piece)
        return piece


def _version(path: Path, descriptor: int) -> tuple[str, int, int, int]:
    status = os.fstat(descriptor)
    return (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _is_still(path: Path, version: tuple[str, int, int, int]) -> bool:
    """Whether the path names that content, and not another file that took its place."""
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns) == version[1:]
