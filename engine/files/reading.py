"""Opening a model folder's files. Only regular files of a sensible size are read.

The server would wait for a pipe for ever, and an endless device would fill the memory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import ModelError
from .wording import reason

# Each limit is several times what the largest known models need.
MAX_JSON_BYTES = 64 << 20  # the index of a checkpoint of a trillion parameters has a quarter
MAX_TEMPLATE_BYTES = 256 << 10  # a template of this size takes seconds to compile if it is all expressions
MAX_TOKENIZER_BYTES = 256 << 20

# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
_POINTER, _MAX_POINTER_BYTES = b"version https://git-lfs.github.com/spec/v1", 1023


def is_there(path: Path) -> bool:
    """Whether there is anything of that name, even a broken link. Raises ModelError if the folder cannot be read.

    For `Path.exists` a broken link is no file, and the model would be served without a part of itself.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return True


def require_file(path: Path, max_bytes: int | None = None) -> int:
    """The size of a file, which may be opened by a library.

    Raises ModelError unless `path` is a regular file of at most `max_bytes`, or a link to one, and has its content.
    """
    status = _regular(path)
    if max_bytes is not None and status.st_size > max_bytes:
        raise ModelError(f"{path} has {status.st_size} bytes; a file of its kind may have at most {_size(max_bytes)}")
    if len(_POINTER) <= status.st_size <= _MAX_POINTER_BYTES and _read(path, len(_POINTER)) == _POINTER:
        raise ModelError(
            f"{path} is a pointer of Git LFS in place of the file, which git did not download: run git lfs pull in "
            f"{path.parent}, or download the model with tidewheel pull"
        )
    return status.st_size


def _regular(path: Path) -> os.stat_result:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        at = f"{path} is a link to a file that" if path.is_symlink() else str(path)
        raise ModelError(f"{at} does not exist") from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} is {_kind(status.st_mode)}; it must be a regular file")
    if not os.access(path, os.R_OK):  # libraries would report this in their own words
        raise ModelError(f"{path} cannot be read: Permission denied")
    return status


def read_file(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes`. Raises ModelError."""
    size = require_file(path, max_bytes)
    return _read(path, size) if size else b""  # files of the system have no size, and some have no end


def read_part(path: Path, num_bytes: int) -> bytes:
    """The first bytes of a regular file, or all of it if it has fewer. Raises ModelError."""
    size = require_file(path)
    return _read(path, min(size, num_bytes)) if size else b""


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        # Something else may have taken the file's place since. Opening it must not block.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return file.read(max_bytes) or b""
    except OSError as error:
        raise _unreadable(path, error) from error


def require_no_special_files(folder: Path) -> None:
    """Raises ModelError if the folder has a pipe, socket or device: a library that opens it would block."""
    try:
        for path in sorted(folder.iterdir()):
            if path.exists() and not path.is_dir():
                _regular(path)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} cannot be read: {reason(error)}")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _size(count: int) -> str:
    return f"{count} bytes" if count < 1 << 20 else f"{count >> 20} MiB"
