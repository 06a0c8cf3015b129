"""`/v1/files` and `/v1/batches` in OpenAI's shapes."""

from __future__ import annotations

from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from .decode import Body

T = TypeVar("T")

BatchStatus: TypeAlias = Literal["validating", "failed", "in_progress", "completed", "cancelling", "cancelled"]


class FileObject(msgspec.Struct, kw_only=True):
    """A file that was uploaded, or a batch's output. `created_at` is in seconds since 1970."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class DeletedFile(msgspec.Struct):
    """What is left of a deleted file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchRequest(Body, kw_only=True):
    """A body of `/v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None

    def without_effect(self) -> dict[str, str]:
        return {"completion_window": "a batch has as long as it needs"}


class BatchFault(msgspec.Struct):
    """Why a batch cannot be run."""

    message: str
    code: str | None = None
    line: int | None = None
    param: str | None = None


class BatchFaults(msgspec.Struct):
    """OpenAI's list of them."""

    data: list[BatchFault]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """How many requests there are, were answered, and ended with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch and how far it is. Times are in seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    created_at: int
    in_progress_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: BatchFaults | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class Page(msgspec.Struct, Generic[T]):
    """A page of a list, newest first."""

    data: list[T]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None
    object: Literal["list"] = "list"
