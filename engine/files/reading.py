"""Opening a model folder's files: what is no regular file, or larger than such a file ever is, is refused unread.

A pipe in a file's place would keep a start waiting for ever, and a device that never ends would fill the memory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ..errors import ModelError

# Each is several times what the largest of the models at hand has.
MAX_JSON_BYTES = 64 << 20  # the index of a checkpoint of a trillion parameters has a quarter
MAX_TEMPLATE_BYTES = 256 << 10  # which take seconds to compile if they are all expressions
MAX_TOKENIZER_BYTES = 256 << 20


def is_there(path: Path) -> bool:
    """Whether there is anything of that name, a link that leads nowhere included. Raises ModelError if nobody may look.

    `Path.exists` takes such a link for no file: a model would be served without a part of itself.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return True


def require_file(path: Path, max_bytes: int | None = None) -> None:
    """Raises ModelError unless `path` is, behind all links, a regular file of at most `max_bytes`.

    For what a library opens by itself.
    """
    try:
        status = path.stat()
    except FileNotFoundError as error:
        at = f"{path} is a link to a file that" if path.is_symlink() else str(path)
        raise ModelError(f"{at} does not exist") from error
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path} is {_kind(status.st_mode)}; it must be a regular file")
    if not os.access(path, os.R_OK):  # libraries have other words for that
        raise ModelError(f"{path} cannot be read: Permission denied")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ModelError(f"{path} has {status.st_size} bytes; a file of its kind may have at most {_size(max_bytes)}")


def read_file(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes`. Raises ModelError."""
    require_file(path, max_bytes)
    try:
        # Whatever has taken its place since, opening it does not wait.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return file.read(max_bytes)
    except OSError as error:
        raise _unreadable(path, error) from error


def require_no_special_files(folder: Path) -> None:
    """Raises ModelError if a folder's pipe, socket or device would keep a library waiting that opens what it finds."""
    try:
        for path in sorted(folder.iterdir()):
            if path.exists() and not path.is_dir():
                require_file(path)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _size(count: int) -> str:
    return f"{count} bytes" if count < 1 << 20 else f"{count >> 20} MiB"
