"""A file that is written region by region, and that a second run completes where the first one stopped."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ..errors import ModelError
from .whole_files import lock, part_of, writing

if TYPE_CHECKING:
    from typing_extensions import Self

_READ_BYTES = 16 << 20
_MAX_UNSAFE_BYTES = 256 << 20  # that are written again after a crash: the disk is waited for now and then only


class PartialFile:
    """`path`, which gets that name when all of it is written and was read back; until then `.part` is added to it.

    Beside it lies a journal: a line of JSON with `identity`, and one for each region that is on the disk. A context
    manager, which keeps other processes out. All methods raise ModelError, naming the file, where it cannot be written.
    """

    def __init__(self, path: Path, identity: str, size: int) -> None:
        self._path, self._size = path, size
        self._part = part_of(path)
        self._journal = path.with_name(path.name + ".journal")
        self._first = {"identity": identity, "size": size}
        self.done: dict[str, dict[str, Any]] = {}
        """What is known of each region that is complete."""
        self._unsafe: list[dict[str, Any]] = []
        self._unsafe_bytes = 0
        self._refuse_to_overwrite()
        if not path.parent.is_dir():
            raise ModelError(f"there is no folder {path.parent} for {path.name}: make it first")

    def __enter__(self) -> Self:
        with writing(self._part):
            self._file = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                lock(self._file, self._part)
                self._refuse_to_overwrite()  # another process may have completed it meanwhile
                self._resume()
                self._log = self._journal.open("a", encoding="utf-8")
                if not self._log.tell():
                    self._note([self._first])
                os.truncate(self._file, self._size)
            except BaseException:
                os.close(self._file)
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is not None:
                self._save()
        finally:
            os.close(self._file)
            self._log.close()

    def _refuse_to_overwrite(self) -> None:
        if self._path.exists():
            raise ModelError(f"{self._path} exists: give another name, or remove it")

    def _resume(self) -> None:
        is_new = not os.fstat(self._file).st_size
        if not self._journal.exists():
            if not is_new:
                raise ModelError(f"{self._part} exists, without its journal: remove it, or give another name")
            return
        entries = self._entries()
        if is_new or len(entries) < 2:  # nothing is lost
            self._journal.unlink()
        elif entries[0] != self._first:
            raise ModelError(
                f"{self._part} was begun with another model or other options: give those again to complete it, or "
                f"remove it and {self._journal.name}"
            )
        else:
            self._journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
            self.done = {entry["name"]: entry for entry in entries[1:]}

    def _entries(self) -> list[dict[str, Any]]:
        try:
            lines = self._journal.read_text(encoding="utf-8").splitlines(keepends=True)
            entries = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may have been cut
        except ValueError:
            entries = [None]
        if not all(isinstance(entry, dict) and (i == 0 or "name" in entry) for i, entry in enumerate(entries)):
            raise ModelError(f"{self._journal} is damaged: remove it and {self._part.name}, and run again")
        return entries

    def write(self, start: int, pieces: Iterable[NDArray[Any] | bytes]) -> int:
        """Write bytes from `start` on; returns their CRC-32."""
        at, checksum = start, 0
        with writing(self._part):
            for piece in pieces:
                view = memoryview(piece).cast("B")  # type: ignore[arg-type]  # numpy has buffers
                checksum = zlib.crc32(view, checksum)
                while view:
                    written = os.pwrite(self._file, view, at)
                    at, view = at + written, view[written:]
                    self._unsafe_bytes += written
        return checksum

    def complete(self, name: str, **facts: Any) -> None:
        """Note that a region is complete."""
        self.done[name] = {"name": name, **facts}
        self._unsafe.append(self.done[name])
        if self._unsafe_bytes >= _MAX_UNSAFE_BYTES:
            self._save()

    def _save(self) -> None:
        """Wait for the disk, and then let the journal say what is on it."""
        with writing(self._part):
            os.fsync(self._file)
            self._note(self._unsafe)
        self._unsafe, self._unsafe_bytes = [], 0

    def verify(self, name: str, start: int, size: int, checksum: int) -> None:
        """Read a region back. Raises ModelError if it has not the CRC-32 that was written."""
        found = 0
        for at in range(start, start + size, _READ_BYTES):
            found = zlib.crc32(os.pread(self._file, min(_READ_BYTES, start + size - at), at), found)
        if found != checksum:
            raise ModelError(
                f"{self._part}: {name} reads otherwise than it was written; check the disk, remove the file and "
                f"{self._journal.name}, and run again"
            )

    @property
    def part(self) -> Path:
        """The file while it is not complete."""
        return self._part

    def finish(self) -> None:
        """Give it its name, and remove the journal."""
        with writing(self._part):
            os.fsync(self._file)
            self._part.rename(self._path)
            self._journal.unlink()

    def _note(self, entries: list[dict[str, Any]]) -> None:
        self._log.write("".join(json.dumps(entry) + "\n" for entry in entries))
        self._log.flush()
        os.fsync(self._log.fileno())
