"""BlockFolder: KV blocks in a folder on disk. The least recently used make room for others."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from ..identity import Digest
from .block_file import HEADER_BYTES, BadFileError, read_block, write_block

_LOCK = "tidewheel-kv.lock"
_MODEL_FOLDER = re.compile(r"tidewheel-kv-[0-9a-f]{32}")
_BLOCK = re.compile(r"[0-9a-f]{32}\.kv")
_PARTIAL = re.compile(r"partial(-[0-9a-f]{32})?\.tmp")
_FOLDER_MODE = 0o700
_FILE_SYSTEM_BLOCK = 4096  # bytes; a file takes a multiple of this
_MAX_FILES = 1 << 20  # whose names take some 300 MB of memory

_Key = tuple[str, Digest]  # the model's folder, and the block


class HeldFolder:
    """A folder that this process has until the last of its `num_users` leaves it, and the blocks of all models in it.

    `index` has the bytes of each, the least recently used first.
    """

    def __init__(self, folder: str, space: int) -> None:
        """Take the folder, making it if need be. Raises ModelError, saying what to change."""
        self.path = Path(folder).expanduser()
        self.space = space
        self.num_bytes = 0
        self.num_users = 0
        self.is_scanned = False
        self.index: OrderedDict[_Key, int] = OrderedDict()
        self.lock = threading.Lock()
        try:
            self.path.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
            self._file = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise ModelError(
                f"--kv-offload {folder} cannot be used: {error.strerror}; name a folder that this process may write to"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise ModelError(
                f"--kv-offload {folder} is in use by another server: give each server a folder of its own"
            ) from error
        except OSError as error:
            os.close(self._file)
            raise _unusable(folder, error) from error

    def leave(self) -> None:
        """One user less; the last one leaves the folder to other processes."""
        with self.lock:
            self.num_users -= 1
            if not self.num_users:
                os.close(self._file)


class HeldFolders:
    """The folders that models of one process have together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Path, HeldFolder] = {}

    def enter(self, folder: str, space: int) -> HeldFolder:
        """The folder, which gets one user more; its `space` is the largest that was asked for. Raises as HeldFolder."""
        path = Path(folder).expanduser()
        with self._lock:
            held = self._held.get(path)
            if held is not None:
                with held.lock:
                    if held.num_users:
                        held.num_users += 1
                        held.space = max(held.space, space)
                        return held
            held = self._held[path] = HeldFolder(folder, space)
            held.num_users = 1
            return held


class BlockFolder:
    """Files of at most `space` bytes in `folder`, each a block of the model that `identity` (16 bytes) names, or of
    other models. One process at a time has the folder, for all models that it is `shared` by.

    Files are in folders of their own, `tidewheel-kv-IDENTITY`; nothing else in `folder` is touched. All methods except
    `has` are for threads that may wait for a disk. They raise OSError if it cannot be used.
    """

    def __init__(self, folder: str, identity: bytes, space: int, shared: HeldFolders | None = None) -> None:
        """Take the folder, making it if need be. Raises ModelError, saying what to change.

        What is in it is found by `scan`.
        """
        self._held = (shared or HeldFolders()).enter(folder, space)
        self._has_left, self._is_alone = False, shared is None  # else another model may just begin to use its own
        self.path = self._held.path
        self._identity = identity
        self._own = f"tidewheel-kv-{identity.hex()}"
        self._index, self._lock = self._held.index, self._held.lock
        try:
            (self.path / self._own).mkdir(_FOLDER_MODE, exist_ok=True)
            if (self.path / self._own).is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, f"{self._own} in it is a link")
        except OSError as error:
            self.close()
            raise _unusable(folder, error) from error

    @property
    def space(self) -> int:
        """The bytes that all models may take together."""
        return self._held.space

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return self._held.num_bytes

    def __len__(self) -> int:
        return len(self._index)

    def has(self, digest: Digest) -> bool:
        """Whether a block of this model is there, from any thread."""
        return (self._own, digest) in self._index

    def scan(self) -> None:
        """Find the files that are there, those that were used last last, and delete what there is no room for.

        Nothing is done if another model has found them.
        """
        with self._lock:
            if self._held.is_scanned:
                return
            self._held.is_scanned = True
        found: list[tuple[int, _Key, int]] = []
        for folder in os.scandir(self.path):
            if not _MODEL_FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            found += _blocks_in(folder)
        found.sort()
        with self._lock:
            for _, key, size in found:
                if key not in self._index:  # written meanwhile
                    self._index[key] = size
                    self._held.num_bytes += size
        self._make_room(0)
        for folder in os.scandir(self.path):
            if _MODEL_FOLDER.fullmatch(folder.name) and folder.name != self._own and self._is_alone:
                _remove_if_empty(folder.path)

    def write(self, digest: Digest, data: NDArray[np.uint8]) -> None:
        """Keep a block. It replaces the least recently used ones."""
        size = _space_of(HEADER_BYTES + data.nbytes)
        self._make_room(size)
        partial = self.path / self._own / f"partial-{secrets.token_hex(16)}.tmp"  # there is nothing of that name
        try:
            write_block(partial, self._identity, digest, data)
            partial.rename(self._file((self._own, digest)))
        except IsADirectoryError:  # has the block's name
            _remove(partial)
            return
        except OSError:
            with contextlib.suppress(OSError):
                _remove(partial)
            raise
        with self._lock:
            self._held.num_bytes += size - self._index.pop((self._own, digest), 0)
            self._index[self._own, digest] = size

    def read(self, digest: Digest, data: NDArray[np.uint8]) -> bool:
        """Fill `data` with a block; False if it is not there any more.

        Raises BadFileError, and deletes the file, if it is not what it should be.
        """
        key = self._own, digest
        path = self._file(key)
        try:
            read_block(path, self._identity, digest, data)
        except FileNotFoundError:
            self._drop(key)
            return False
        except BadFileError:
            self._drop(key)
            _remove(path)
            raise
        return True

    def touch(self, digests: Sequence[Digest]) -> None:
        """Note that blocks of a sequence, in its order, were of use. The later ones make room earlier: without those
        before it a block is of no use.
        """
        for digest in reversed(digests):
            key = self._own, digest
            with self._lock:
                if key not in self._index:
                    continue
                self._index.move_to_end(key)
            now = time.time_ns()  # the system's own times of files are too coarse to tell these apart
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._file(key), ns=(now, now), follow_symlinks=False)

    def clear(self) -> None:
        """Delete all files."""
        while self._index:
            self._delete_first()

    def close(self) -> None:
        """Leave the folder to others. Calling it twice is allowed."""
        if not self._has_left:
            self._has_left = True
            self._held.leave()

    def _make_room(self, size: int) -> None:
        while self._index and (self.num_bytes + size > self.space or len(self._index) >= _MAX_FILES):
            self._delete_first()

    def _delete_first(self) -> None:
        with self._lock:
            if not self._index:  # another thread may have taken the last one out
                return
            key, size = self._index.popitem(last=False)
            self._held.num_bytes -= size
        _remove(self._file(key))

    def _drop(self, key: _Key) -> None:
        with self._lock:
            self._held.num_bytes -= self._index.pop(key, 0)

    def _file(self, key: _Key) -> Path:
        folder, digest = key
        return self.path / folder / f"{digest.hex()}.kv"


def _blocks_in(folder: os.DirEntry[str]) -> list[tuple[int, _Key, int]]:
    """The blocks of a model: when each was used last, what it is, and its bytes. What has the name of a block and is no
    file is left as it is.
    """
    found = []
    for entry in os.scandir(folder.path):
        if _PARTIAL.fullmatch(entry.name):
            _remove(Path(entry.path))
        elif _BLOCK.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            status = entry.stat(follow_symlinks=False)
            key = folder.name, bytes.fromhex(entry.name[:32])
            found.append((status.st_mtime_ns, key, _space_of(status.st_size)))
    return found


def _space_of(num_bytes: int) -> int:
    return -(-num_bytes // _FILE_SYSTEM_BLOCK) * _FILE_SYSTEM_BLOCK


def _unusable(folder: str, error: OSError) -> ModelError:
    return ModelError(
        f"--kv-offload {folder} cannot be used: {error.strerror}; name a folder on a file system that has locks and "
        "that this process may write to"
    )


def _remove(path: Path) -> None:
    """A folder that has the name of a file is left as it is."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):  # systems differ in what they say of a folder
        if not path.is_dir():
            raise


def _remove_if_empty(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:  # models that were served before still have blocks here
        return
