"""Reading images below a folder of this machine that the operator has opened to requests."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from .errors import FetchError

_NO_FILE = "there is no such file below --allowed-local-media-path"


def read_below(folder: str, path: str, max_bytes: int) -> bytes:
    """The content of a regular file that, behind all links, is below `folder`.

    Raises FetchError, which says the same whether a file is not there, elsewhere, or may not be read.
    """
    try:
        root = Path(folder).resolve(strict=True)
        parts = Path(path).resolve(strict=True).relative_to(root).parts
        with contextlib.ExitStack() as opened:
            file = _opened(root, parts, opened)
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise FetchError(_NO_FILE)
            if status.st_size > max_bytes:
                raise FetchError(f"it has more than {max_bytes} bytes")
            with open(file, "rb", closefd=False) as content:
                return content.read(max_bytes)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links, for older Pythons
        raise FetchError(_NO_FILE) from error


def _opened(root: Path, parts: tuple[str, ...], opened: contextlib.ExitStack) -> int:
    """Folder by folder without following links: one that is replaced by a link meanwhile leads nowhere."""
    no_link = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    file = os.open(root, no_link | os.O_DIRECTORY)
    opened.callback(os.close, file)
    for i, part in enumerate(parts):
        file = os.open(part, no_link | (os.O_DIRECTORY if i < len(parts) - 1 else 0), dir_fd=file)
        opened.callback(os.close, file)
    return file
