"""`/v1/files`: files of requests for batches, and what the batches answered."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ..batches.multipart import read_form
from ..batches.store import BatchStore
from ..errors import ApiError, bad_request, error_response
from ..http.api_keys import current_tenant
from ..openapi.document import operation
from ..protocol.batches import DeletedFile, FileObject, Page
from .body import whole_body
from .json_response import json_response

_PURPOSE = "batch"


class FilesEndpoints:
    """Keeps files in a store."""

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._writing = asyncio.Lock()

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/v1/files", self._upload, methods=["POST"]),
            Route("/v1/files", self._list),
            Route("/v1/files/{id}", self._retrieve),
            Route("/v1/files/{id}", self._delete, methods=["DELETE"]),
            Route("/v1/files/{id}/content", self._content),
        ]

    @operation("Upload a file of requests, as multipart/form-data", response=FileObject)
    async def _upload(self, request: Request) -> Response:
        raw = await whole_body(request)
        fields = await asyncio.to_thread(read_form, request.headers.get("content-type", ""), raw)
        part, purpose = fields.get("file"), fields.get("purpose")
        if part is None or part.filename is None:
            raise bad_request("file is required", "file", "missing_required_parameter")
        if purpose is None or purpose.content != _PURPOSE.encode():
            raise bad_request(f"purpose must be {_PURPOSE}: this server keeps files only for batches", "purpose")
        async with self._writing:  # or files that come together would all be within the limits
            await self._store.refresh()
            file = self._store.new_file(part.filename, _PURPOSE, len(part.content), current_tenant().owner)
            path = self._store.content_path(file.id)
            try:
                await asyncio.to_thread(path.write_bytes, part.content)
            except OSError as error:
                path.unlink(missing_ok=True)
                message = f"the server cannot keep the file: {error.strerror}"
                raise ApiError(HTTPStatus.INSUFFICIENT_STORAGE, message, code="no_space") from error
            try:
                await self._store.add_file(file)
            except ApiError:
                await asyncio.to_thread(path.unlink, missing_ok=True)
                raise
        return json_response(file.without_owner())

    @operation("List the files", response=Page[FileObject])
    async def _list(self, request: Request) -> Response:
        await self._store.refresh()
        purpose = request.query_params.get("purpose")
        files = [file.without_owner() for file in self._store.files if purpose in (None, file.purpose)]
        ids = (files[0].id, files[-1].id) if files else (None, None)
        return json_response(Page(files, False, *ids))

    @operation("One file", response=FileObject)
    async def _retrieve(self, request: Request) -> Response:
        await self._store.refresh()
        return json_response(self._store.file(request.path_params["id"]).without_owner())

    @operation("Delete a file", response=DeletedFile)
    async def _delete(self, request: Request) -> Response:
        file_id = request.path_params["id"]
        await self._store.refresh()
        await self._store.delete_file(file_id)
        return json_response(DeletedFile(file_id))

    @operation("The content of a file", media_type="application/jsonl")
    async def _content(self, request: Request) -> Response:
        await self._store.refresh()
        file = self._store.file(request.path_params["id"])
        return _Content(await asyncio.to_thread(_opened, self._store.content_path(file.id)))


class _Content(FileResponse):
    """A file, or the parts of it that a `range` header asks for. Parts that it does not have are ApiErrors.

    The file is open already, because it may be deleted after the head of the answer was sent.
    """

    def __init__(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        super().__init__(f"/dev/fd/{file.fileno()}", media_type="application/jsonl", stat_result=status)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused: int | None = None
        headers: Headers | None = None

        async def send_unless_refused(message: Message) -> None:
            nonlocal refused, headers
            if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.BAD_REQUEST:
                refused, headers = message["status"], Headers(raw=message["headers"])
            if refused is None:
                await send(message)

        await super().__call__(scope, receive, send_unless_refused)
        if refused is None:
            return
        size = {"content-range": headers["content-range"]} if headers and "content-range" in headers else {}
        error = ApiError(
            HTTPStatus(refused),
            "the range header asks for bytes that the file does not have: leave it out, or ask for bytes=FIRST-LAST "
            f"within {self.headers['content-length']} bytes",
            param="range",
            code="invalid_range",
            headers=size,
        )
        await error_response(error)(scope, receive, send)


def _opened(path: Path) -> BinaryIO:
    """Opens the content. Raises ApiError (404) if it was removed, or replaced by something else."""
    try:
        # Opening a pipe must not block, and a link may lead anywhere.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    except (FileNotFoundError, IsADirectoryError):
        pass
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, and a socket
            raise
    message = f"the content of {path.stem} is not in the server's folder any more"
    raise ApiError(HTTPStatus.NOT_FOUND, message, param="file_id", code="file_not_found")
