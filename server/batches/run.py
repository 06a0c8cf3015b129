"""Runs the requests of a batch, a limited number at a time, and hands over their answers as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from http import HTTPStatus
from typing import Any, NamedTuple, TypeAlias

from tidewheel.engine.errors import EngineDeadError

from ..errors import ApiError
from ..pace import Pace
from .rows import BatchRow, answer_line, error_line, error_of

Post: TypeAlias = Callable[[str, bytes], Coroutine[Any, Any, tuple[int, bytes]]]
"""Sends a body to a path: see AppClient."""

Write: TypeAlias = Callable[[bytes, bool], None]
"""Takes a line of output, and whether it is an answer and no error."""

_RETRY_S = 1.0
_BUSY = "busy"  # the code of a model that has no room yet
_STOPPED = ("aborted", "engine_unavailable")  # codes of a server that answers nothing more
_READ_ROWS, _READ_BYTES = 64, 2**20  # are read at a time


async def run_rows(
    rows: Iterable[BatchRow],
    post: Post,
    write: Write,
    *,
    concurrency: int,
    url: str | None = None,
    body_of: Callable[[BatchRow], bytes] | None = None,
    pace: Pace | None = None,
) -> None:
    """Answer all rows, `concurrency` of them at a time. They are read in worker threads.

    With `url`, rows for other endpoints are errors. `body_of` makes the body that is sent for a row, in place of the
    row's own. `pace` leaves the event loop to others. A request that the server is too busy for is sent again. Raises
    EngineDeadError when the server cannot answer any more: what was not written can be run later.
    """
    prepared = _Prepared(rows, url, body_of or (lambda row: bytes(row.body)))
    workers = [asyncio.create_task(_work(prepared, post, write, pace)) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class _Request(NamedTuple):
    """A row that can be sent, or why it cannot."""

    custom_id: str
    url: str
    body: bytes
    error: ApiError | None = None


class _Prepared:
    """Requests of rows, which are read and checked in worker threads, a few at a time."""

    def __init__(self, rows: Iterable[BatchRow], url: str | None, body_of: Callable[[BatchRow], bytes]) -> None:
        self._rows: Iterator[BatchRow] = iter(rows)
        self._url = url
        self._body_of = body_of
        self._ready: deque[_Request] = deque()
        self._reading = asyncio.Lock()

    async def next(self) -> _Request | None:
        """The next one, or None after the last."""
        async with self._reading:
            if not self._ready:
                self._ready.extend(await asyncio.to_thread(self._read))
            return self._ready.popleft() if self._ready else None

    def _read(self) -> list[_Request]:
        requests: list[_Request] = []
        size = 0
        for row in self._rows:
            try:
                row.check(self._url)
                requests.append(_Request(row.custom_id, row.url, self._body_of(row)))
            except ApiError as error:
                requests.append(_Request(row.custom_id, row.url, b"", error))
            size += len(row.body)
            if len(requests) >= _READ_ROWS or size >= _READ_BYTES:
                break
        return requests


async def _work(prepared: _Prepared, post: Post, write: Write, pace: Pace | None) -> None:
    work = _answer_all(prepared, post, write)
    await (work if pace is None else pace.run(work))


async def _answer_all(prepared: _Prepared, post: Post, write: Write) -> None:
    while (request := await prepared.next()) is not None:
        await _answer(request, post, write)


async def _answer(request: _Request, post: Post, write: Write) -> None:
    if request.error is not None:
        write(error_line(request.custom_id, request.error), False)
        return
    while True:
        status, content = await post(request.url, request.body)
        failed = error_of(content) if status == HTTPStatus.SERVICE_UNAVAILABLE else None
        if status != HTTPStatus.TOO_MANY_REQUESTS and (failed is None or failed.code != _BUSY):
            break
        await asyncio.sleep(_RETRY_S)
    if failed is not None and failed.code in _STOPPED:
        raise EngineDeadError(failed.message)
    write(answer_line(request.custom_id, status, content), status == HTTPStatus.OK)
