"""KeptTokenizers: the tokenizers of the models that a process loaded last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

LARGE_VOCABULARY = 32_000
"""Tokens. To make a tokenizer of so many holds the interpreter's lock for tens of milliseconds, or far longer."""

_MOST = 4

Made = TypeVar("Made")

FilesVersion = tuple[tuple[str, int, int, int], ...]
"""Of each file: its name, its number, when it was written, and its bytes."""


class KeptTokenizers:
    """Tokenizers of any class, by the files that they were made from, also after their models were unloaded.

    Making one of 128,000 tokens takes longer than reading the packed weights of a small model, and holds the
    interpreter's lock for hundreds of milliseconds: all streams of the process would stand still. Models with the same
    files share one.
    """

    def __init__(self, most: int = _MOST) -> None:
        """No more than `most` are kept: those that were asked for last."""
        self._most = most
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Path, str], tuple[FilesVersion, Any]] = OrderedDict()

    def get(self, path: Path, version: FilesVersion, mode: str, make: Callable[[], Made]) -> Made:
        """The tokenizer of a folder or file, which is made as `mode` says if it is not kept in this version.

        From any thread. Those of different classes must have different modes. Raises what `make` raises.
        """
        key = path, mode
        with self._lock:
            found = self._kept.pop(key, None)
            if found is not None and found[0] == version:
                self._kept[key] = found
                kept: Made = found[1]
                return kept
        made = make()
        with self._lock:
            self._kept[key] = version, made
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return made


def files_version(path: Path) -> FilesVersion:
    """The version of a file, or of all files of a folder."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    statuses = [(file.name, file.stat()) for file in files]
    return tuple((name, status.st_ino, status.st_mtime_ns, status.st_size) for name, status in statuses)
