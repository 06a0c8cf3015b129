"""BatchStore: files and batches in a folder, where a restart finds them, and so do other servers with that folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import msgspec

from tidewheel.engine.errors import TidewheelError, quoted, shortened
from tidewheel.engine.files.wording import reason

from ..errors import ApiError, bad_request
from ..http.api_keys import current_tenant
from ..ids import new_id
from ..protocol.batches import BatchObject, FileObject

logger = logging.getLogger(__name__)

MAX_FILES = 1000
MAX_BATCHES = 1000
MAX_BYTES = 8 * 2**30  # of all files
_MAX_DESCRIPTION = 2**18  # bytes; metadata of 16 names and texts is the most that there is
_ID = re.compile(r"(?:file|batch)-[0-9a-f]{32}")
_DESCRIBES = re.compile(r"((?:file|batch)-[0-9a-f]{32})\.json")
_CANCELS = re.compile(r"(batch-[0-9a-f]{32})\.cancel")
_UNFINISHED = ("validating", "in_progress", "cancelling")


class KeptFile(FileObject, kw_only=True):
    """A file as it lies in the folder, with the owner of the key that it was uploaded with."""

    owner: str = ""

    def without_owner(self) -> FileObject:
        """The file as clients see it."""
        return msgspec.convert(self, FileObject, from_attributes=True)


class KeptBatch(BatchObject, kw_only=True):
    """A batch as it lies in the folder, with the owner of the key that it was started with."""

    owner: str = ""

    def without_owner(self) -> BatchObject:
        """The batch as clients see it."""
        return msgspec.convert(self, BatchObject, from_attributes=True)


Described = KeptFile | KeptBatch
T = TypeVar("T", KeptFile, KeptBatch)
_PART = ".part"
_PART_LIFE_S = 3600.0  # by then its writer has ended


class BatchStore:
    """Files and batches by their ids, as the folder had them at the last `refresh`.

    `file`, `files`, `batch` and `batches` are what the current tenant may see. All limits are for all tenants together.

    Each has a JSON file that describes it. A file has its content beside it. A batch that is to be cancelled has
    another file that says so, because the server that runs it writes the first one. Raises TidewheelError if the folder
    cannot be used. All methods except `content_path` and `read` are for the event loop, and do not wait for the disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, tuple[tuple[int, int, int], Described]] = {}  # by file, with what tells of changes
        self._damaged: set[str] = set()
        self._files: dict[str, KeptFile] = {}
        self._batches: dict[str, KeptBatch] = {}
        self._begun = self._scanned = 0  # the last scan that was begun, and the last one that succeeded
        self._changing = asyncio.Lock()  # a scan that began before a write would forget what was written
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._take(*self._scan())
        except OSError as error:
            raise TidewheelError(f"--batch-dir {folder} cannot be used: {reason(error)}") from error

    async def refresh(self) -> None:
        """Learns what other servers have changed. Raises ApiError (503) if the folder cannot be read."""
        begun = self._begun
        async with self._changing:
            if self._scanned > begun:  # others wanted to know too
                return
            self._begun += 1
            with _disk_errors():
                self._take(*await asyncio.to_thread(self._scan))
            self._scanned = self._begun

    def new_file(self, filename: str, purpose: str, size: int, owner: str) -> KeptFile:
        """A file whose content is still to be written to its `content_path`, then `add_file`. Raises ApiError (413)."""
        used = sum(file.bytes for file in self._files.values())
        if len(self._files) >= MAX_FILES or used + size > MAX_BYTES:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"this server keeps at most {MAX_FILES} files and {MAX_BYTES} bytes of them: delete some",
                code="too_many_files",
            )
        name = shortened(filename or "file", 200)
        return KeptFile(
            id=_new_id("file"),
            bytes=size,
            created_at=int(time.time()),
            filename=name,
            purpose=purpose,
            owner=owner,
        )

    async def add_file(self, file: KeptFile) -> None:
        """Keep a file whose content is there."""
        async with self._changing:
            self._files[file.id] = file
            await self._write(file.id, file)

    def file(self, file_id: str) -> KeptFile:
        """Raises ApiError (404)."""
        return _found(self._files, file_id, "file")

    @property
    def files(self) -> list[KeptFile]:
        """Newest first."""
        return sorted(_seen(self._files), key=lambda file: file.created_at, reverse=True)

    def content_path(self, file_id: str) -> Path:
        """Where the content of a file lies."""
        return self.folder / f"{file_id}.jsonl"

    async def delete_file(self, file_id: str) -> None:
        """Raises ApiError: 404, or 400 while an unfinished batch needs the file."""
        self.file(file_id)
        for batch in self.unfinished:
            if file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                raise bad_request(f"the batch {batch.id} needs the file: cancel it first", "file_id")
        async with self._changing:
            self._files.pop(file_id, None)
            await self._remove(f"{file_id}.json", f"{file_id}.jsonl")

    async def new_batch(
        self, endpoint: str, input_file_id: str, metadata: dict[str, str] | None, owner: str
    ) -> KeptBatch:
        """A batch of a file. The oldest that has ended makes room, of the owner with most of them.

        Raises ApiError (429) if none has ended.
        """
        if len(self._batches) >= MAX_BATCHES:
            ended = [batch for batch in self._batches.values() if batch.status not in _UNFINISHED]
            if not ended:
                message = f"{MAX_BATCHES} batches run or wait already: try again later"
                raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full")
            held = Counter(batch.owner for batch in ended)
            oldest = min(ended, key=lambda batch: (-held[batch.owner], batch.owner, batch.created_at))
            async with self._changing:
                self._batches.pop(oldest.id, None)
                await self._remove(f"{oldest.id}.json")
        batch = KeptBatch(
            id=_new_id("batch"),
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window="24h",
            created_at=int(time.time()),
            metadata=metadata,
            owner=owner,
        )
        await self.save(batch)
        return batch

    def batch(self, batch_id: str) -> KeptBatch:
        """Raises ApiError (404)."""
        return _found(self._batches, batch_id, "batch")

    @property
    def batches(self) -> list[KeptBatch]:
        """Newest first."""
        return sorted(_seen(self._batches), key=lambda batch: batch.created_at, reverse=True)

    @property
    def unfinished(self) -> list[KeptBatch]:
        """The batches that run or wait, whosever they are, oldest first."""
        unfinished = [one for one in self._batches.values() if one.status in _UNFINISHED]
        return sorted(unfinished, key=lambda batch: batch.created_at)

    async def save(self, batch: KeptBatch) -> None:
        """Keep a batch's new state. If it has ended, it need not be cancelled any more."""
        async with self._changing:
            self._batches[batch.id] = msgspec.structs.replace(
                batch, request_counts=msgspec.structs.replace(batch.request_counts)
            )
            await self._write(batch.id, batch)
            if batch.status not in _UNFINISHED:
                await self._remove(f"{batch.id}.cancel")

    async def ask_to_cancel(self, batch_id: str) -> None:
        """Ask the server that runs the batch to end it."""
        with _disk_errors():
            await asyncio.to_thread((self.folder / f"{batch_id}.cancel").touch)

    def read(self, batch_id: str) -> KeptBatch | None:
        """A batch as the folder has it, for the server that runs it. Raises OSError and msgspec.DecodeError."""
        try:
            batch = msgspec.json.decode(_read_small(self.folder / f"{batch_id}.json"), type=KeptBatch)
            _check_names(batch, batch_id)
        except FileNotFoundError:
            return None
        if batch.status in _UNFINISHED:
            with contextlib.suppress(FileNotFoundError):
                batch.cancelling_at = int((self.folder / f"{batch_id}.cancel").stat().st_mtime)
                batch.status = "cancelling"
        return batch

    def _scan(self) -> tuple[dict[str, tuple[tuple[int, int, int], Described]], dict[str, float]]:
        """The descriptions of files and batches, by name, and when each batch was asked to be cancelled."""
        found: dict[str, tuple[tuple[int, int, int], Described]] = {}
        cancels: dict[str, float] = {}
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.name.endswith(_PART) and entry.stat().st_mtime < time.time() - _PART_LIFE_S:
                        os.unlink(entry.path)
                    if name := _CANCELS.fullmatch(entry.name):
                        cancels[name[1]] = entry.stat().st_mtime
                    if (name := _DESCRIBES.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                        status = entry.stat()
                        state = (status.st_ino, status.st_mtime_ns, status.st_size)
                        known = self._known.get(name[1])
                        if known is not None and known[0] == state:
                            found[name[1]] = known
                        elif (described := self._described(name[1], Path(entry.path))) is not None:
                            found[name[1]] = state, described
        return found, cancels

    def _described(self, name: str, path: Path) -> Described | None:
        kind: type[Described] = KeptFile if name.startswith("file") else KeptBatch
        try:
            described = msgspec.json.decode(_read_small(path), type=kind)
            _check_names(described, name)
            return described
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if name not in self._damaged:
                self._damaged.add(name)
                logger.warning("%s is damaged, and left out: %s", path, error)
            return None

    def _take(self, found: dict[str, tuple[tuple[int, int, int], Described]], cancels: dict[str, float]) -> None:
        self._known = found
        self._files = {name: one for name, (_, one) in found.items() if isinstance(one, KeptFile)}
        self._batches = {
            name: _with_cancel(one, cancels.get(name)) for name, (_, one) in found.items() if isinstance(one, KeptBatch)
        }

    async def _write(self, name: str, value: msgspec.Struct) -> None:
        path, content = self.folder / f"{name}.json", msgspec.json.encode(value)

        def write() -> None:
            part = self.folder / f"{name}.{new_id()}{_PART}"
            try:
                with part.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)  # a crash leaves the old state or the new one
            except OSError:
                with contextlib.suppress(OSError):
                    part.unlink()
                raise

        with _disk_errors():
            await asyncio.to_thread(write)

    async def _remove(self, *names: str) -> None:
        def remove() -> None:
            for name in names:
                (self.folder / name).unlink(missing_ok=True)

        with _disk_errors():
            await asyncio.to_thread(remove)


def _read_small(path: Path) -> bytes:
    """The description of a file or a batch. Raises OSError, and DecodeError for a file that is too large for one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        content = file.read(_MAX_DESCRIPTION + 1) or b""
    if len(content) > _MAX_DESCRIPTION:
        raise msgspec.DecodeError(f"it has more than {_MAX_DESCRIPTION} bytes")
    return content


def _check_names(described: Described, name: str) -> None:
    """Raises DecodeError for ids that would name files outside of the folder: others who write there choose them."""
    ids = [described.id]
    if isinstance(described, KeptBatch):
        ids += [one for one in (described.input_file_id, described.output_file_id, described.error_file_id) if one]
    if described.id != name or not all(map(_ID.fullmatch, ids)):
        raise msgspec.DecodeError("its ids were not made by this server")


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"the folder of batches cannot be used: {error.strerror or error}"
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="batches_unavailable") from error


def _with_cancel(batch: KeptBatch, asked_at: float | None) -> KeptBatch:
    """The batch as clients see it when it was asked to be cancelled."""
    if asked_at is None or batch.status not in _UNFINISHED:
        return batch
    return msgspec.structs.replace(batch, status="cancelling", cancelling_at=int(asked_at))


def _new_id(prefix: str) -> str:
    return f"{prefix}-{new_id()}"


def _seen(among: dict[str, T]) -> list[T]:
    """What the current tenant may see."""
    tenant = current_tenant()
    return [one for one in among.values() if tenant.sees(one.owner)]


def _found(among: dict[str, T], name: str, what: str) -> T:
    found = among.get(name)
    if found is None or not current_tenant().sees(found.owner):
        message = f"there is no {what} {quoted(name)}"
        raise ApiError(HTTPStatus.NOT_FOUND, message, param=f"{what}_id", code=f"{what}_not_found")
    return found
