"""BatchStore: files and batches in a folder, where a restart finds them."""

from __future__ import annotations

import os
import re
import time
import uuid
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import msgspec

from tidewheel.engine.errors import TidewheelError, quoted, shortened

from ..errors import ApiError, bad_request
from ..protocol.batches import BatchObject, FileObject

MAX_FILES = 1000
MAX_BATCHES = 1000
MAX_BYTES = 8 * 2**30  # of all files
_ID = re.compile(r"(?:file|batch)-[0-9a-f]{32}")

T = TypeVar("T", FileObject, BatchObject)


class BatchStore:
    """Files and batches by their ids. Each has a JSON file that describes it; a file has its content beside it.

    Raises TidewheelError if the folder cannot be used. Everything is called on the event loop, but for `content_path`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._files = self._read("file", FileObject)
            self._batches = self._read("batch", BatchObject)
        except (OSError, msgspec.DecodeError) as error:
            raise TidewheelError(f"--batch-dir {folder} cannot be used: {error}") from error

    def new_file(self, filename: str, purpose: str, size: int) -> FileObject:
        """A file whose content is still to be written to its `content_path`, then `add_file`. Raises ApiError (413)."""
        used = sum(file.bytes for file in self._files.values())
        if len(self._files) >= MAX_FILES or used + size > MAX_BYTES:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"this server keeps at most {MAX_FILES} files and {MAX_BYTES} bytes of them: delete some",
                code="too_many_files",
            )
        name = shortened(filename or "file", 200)
        return FileObject(id=_new_id("file"), bytes=size, created_at=int(time.time()), filename=name, purpose=purpose)

    def add_file(self, file: FileObject) -> None:
        """Keep a file whose content is there."""
        self._files[file.id] = file
        self._write(file.id, file)

    def file(self, file_id: str) -> FileObject:
        """Raises ApiError (404)."""
        return _found(self._files, file_id, "file")

    @property
    def files(self) -> list[FileObject]:
        """All files, newest first."""
        return sorted(self._files.values(), key=lambda file: file.created_at, reverse=True)

    def content_path(self, file_id: str) -> Path:
        """Where the content of a file lies."""
        return self._folder / f"{file_id}.jsonl"

    def delete_file(self, file_id: str) -> None:
        """Raises ApiError: 404, or 400 while an unfinished batch needs the file."""
        self.file(file_id)
        for batch in self.unfinished:
            if file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                raise bad_request(f"the batch {batch.id} needs the file: cancel it first", "file_id")
        del self._files[file_id]
        for path in (self._folder / f"{file_id}.json", self.content_path(file_id)):
            path.unlink(missing_ok=True)

    def new_batch(self, endpoint: str, input_file_id: str, metadata: dict[str, str] | None) -> BatchObject:
        """A batch of a file. The oldest that has ended makes room. Raises ApiError (429) if none has."""
        if len(self._batches) >= MAX_BATCHES:
            ended = [batch for batch in reversed(self.batches) if batch not in self.unfinished]
            if not ended:
                message = f"{MAX_BATCHES} batches run or wait already: try again later"
                raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="queue_full")
            del self._batches[ended[0].id]
            (self._folder / f"{ended[0].id}.json").unlink(missing_ok=True)
        batch = BatchObject(
            id=_new_id("batch"),
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window="24h",
            created_at=int(time.time()),
            metadata=metadata,
        )
        self._batches[batch.id] = batch
        self.save(batch)
        return batch

    def batch(self, batch_id: str) -> BatchObject:
        """Raises ApiError (404)."""
        return _found(self._batches, batch_id, "batch")

    @property
    def batches(self) -> list[BatchObject]:
        """All batches, newest first."""
        return sorted(self._batches.values(), key=lambda batch: batch.created_at, reverse=True)

    @property
    def unfinished(self) -> list[BatchObject]:
        """The batches that run or wait, oldest first."""
        return [one for one in reversed(self.batches) if one.status in ("validating", "in_progress", "cancelling")]

    def save(self, batch: BatchObject) -> None:
        """Keep a batch's new state."""
        self._write(batch.id, batch)

    def _write(self, name: str, value: msgspec.Struct) -> None:
        path = self._folder / f"{name}.json"
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(value))
        os.replace(part, path)  # a crash leaves the old state or the new one

    def _read(self, prefix: str, kind: type[T]) -> dict[str, T]:
        paths = (path for path in self._folder.glob(f"{prefix}-*.json") if _ID.fullmatch(path.stem))
        return {path.stem: msgspec.json.decode(path.read_bytes(), type=kind) for path in paths}


def _new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def _found(among: dict[str, T], name: str, what: str) -> T:
    try:
        return among[name]
    except KeyError:
        message = f"there is no {what} {quoted(name)}"
        raise ApiError(HTTPStatus.NOT_FOUND, message, param=f"{what}_id", code=f"{what}_not_found") from None
