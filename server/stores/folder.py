"""FolderStore: a folder that all replicas see, be it on a network. Each value is a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tidewheel.engine.errors import TidewheelError

from ..ids import new_id
from .base import MAX_VALUE_BYTES, PREFIX, Kind, StoreError, When, check_size, name_of

MAX_BYTES = 8 * 2**30  # of one kind
_THREADS = 4
_TIMEOUT_S = 10.0
_PART = ".part"
_PART_LIFE_S = 3600.0  # by then its writer has ended

T = TypeVar("T")


class FolderStore:
    """A SharedStore in `folder`. A file's last change says when it was put or read last.

    Machines that share a folder need clocks that agree within a few seconds. Raises TidewheelError for a folder that
    cannot be used.
    """

    def __init__(self, folder: str) -> None:
        self.shown = folder
        self._root = Path(folder).expanduser() / f"{PREFIX}-store"
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="store")
        self._puts: Counter[str] = Counter()
        try:
            self._root.mkdir(0o700, parents=True, exist_ok=True)
            _write(self._root / f"{new_id()}{_PART}", b"", lasts=False).unlink()
        except OSError as error:
            raise TidewheelError(
                f"--shared-store {folder} cannot be used: {error.strerror or error}; name a folder that this process "
                "may write to"
            ) from error

    async def get(self, kind: Kind, key: str) -> bytes | None:
        """See SharedStore."""
        return await self._run(lambda: self._read(kind, self._path(kind, key)))

    async def put(self, kind: Kind, key: str, value: bytes, when: When = "always") -> bool:
        """See SharedStore."""
        check_size(value)
        return await self._run(lambda: self._put(kind, key, value, when))

    async def delete(self, kind: Kind, key: str) -> bool:
        """See SharedStore."""
        return await self._run(lambda: _remove(self._path(kind, key)))

    async def values(self, kind: Kind) -> list[bytes]:
        """See SharedStore."""
        return await self._run(lambda: self._values(kind))

    async def close(self) -> None:
        """See SharedStore."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        has_begun = False

        def run() -> T:
            nonlocal has_begun
            has_begun = True
            return work()

        done = asyncio.get_running_loop().run_in_executor(self._threads, run)
        try:
            await asyncio.wait({done}, timeout=_TIMEOUT_S)
            if not done.done():
                slow = (
                    "has not answered" if has_begun else f"is busy: it has answered none of {_THREADS} earlier requests"
                )
                raise StoreError(f"the store in {self.shown} {slow} for {_TIMEOUT_S:g} seconds")
        finally:
            done.cancel()
        try:
            return done.result()
        except OSError as error:
            raise StoreError(f"the store in {self.shown} cannot be used: {error.strerror or error}") from error

    def _path(self, kind: Kind, key: str) -> Path:
        return self._root / kind.name / name_of(key)

    def _read(self, kind: Kind, path: Path) -> bytes | None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_VALUE_BYTES:
                return None
            if _has_expired(kind, status.st_mtime):
                _remove(path)
                return None
            value = file.read(MAX_VALUE_BYTES)
        if kind.renews:
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
        return value

    def _put(self, kind: Kind, key: str, value: bytes, when: When) -> bool:
        path = self._path(kind, key)
        path.parent.mkdir(0o700, exist_ok=True)
        if when == "new":
            self._read(kind, path)  # an expired one makes way
        elif when == "there" and not path.exists():
            return False
        part = _write(path.with_name(new_id() + _PART), value, lasts=kind.lasts)
        try:
            if when == "new":
                os.link(part, path)
            else:
                os.replace(part, path)
        except FileExistsError:
            return False
        finally:
            _remove(part)
        if kind.lasts:
            _sync_folder(path.parent)
        self._trim_now_and_then(kind)
        return True

    def _values(self, kind: Kind) -> list[bytes]:
        read = (self._read(kind, Path(entry.path)) for entry in self._entries(kind))
        return [value for value in read if value is not None]

    def _trim_now_and_then(self, kind: Kind) -> None:
        """Looking through thousands of files takes longer than a put: it is done for each hundredth part of them."""
        count = self._puts[kind.name]
        self._puts[kind.name] += 1
        if count % max(1, (kind.most or 10_000) // 100) == 0:
            self._trim(kind)

    def _trim(self, kind: Kind) -> None:
        found = []
        for entry in self._entries(kind):
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime, status.st_size, entry.path))
        found.sort(reverse=True)
        total = 0
        for count, (changed, size, path) in enumerate(found, 1):
            total += size
            too_many = kind.most is not None and (count > kind.most or total > MAX_BYTES)
            if too_many or _has_expired(kind, changed):
                _remove(Path(path))

    def _entries(self, kind: Kind) -> Iterator[os.DirEntry[str]]:
        """The files of a kind. What a process that was killed has left of others is deleted."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root / kind.name) as entries:
            for entry in entries:
                if not entry.name.endswith(_PART):
                    yield entry
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime < time.time() - _PART_LIFE_S:
                        os.unlink(entry.path)


def _has_expired(kind: Kind, changed: float) -> bool:
    return kind.expires_s is not None and changed + kind.expires_s < time.time()


def _write(path: Path, value: bytes, *, lasts: bool) -> Path:
    try:
        with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(value)
            if lasts:
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()  # or a full disk would keep it
        raise
    return path


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
