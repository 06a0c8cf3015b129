"""Runs the requests of a batch, so many at a time, and hands over their answers as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from http import HTTPStatus
from typing import TypeAlias

from tidewheel.engine.errors import EngineDeadError

from ..errors import ApiError
from .rows import BatchRow, answer_line, error_line, error_of

Post: TypeAlias = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""Sends a body to a path: see AppClient."""

Write: TypeAlias = Callable[[bytes, bool], None]
"""Takes a line of output, and whether it is an answer and no error."""

_RETRY_S = 1.0
_STOPPED = ("aborted", "engine_unavailable")  # codes of a server that answers nothing more


async def run_rows(
    rows: Iterable[BatchRow], post: Post, write: Write, *, concurrency: int, url: str | None = None
) -> None:
    """Answer all rows, `concurrency` of them at a time.

    With `url`, rows for other endpoints are errors. A request that the server is too busy for is sent again. Raises
    EngineDeadError when the server cannot answer any more: what was not written can be run later.
    """
    waiting = iter(rows)
    workers = [asyncio.create_task(_work(waiting, post, write, url)) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _work(rows: Iterator[BatchRow], post: Post, write: Write, url: str | None) -> None:
    for row in rows:
        try:
            row.check(url)
        except ApiError as error:
            write(error_line(row.custom_id, error), False)
            await asyncio.sleep(0)
            continue
        status, content = await _answer(row, post)
        if status == HTTPStatus.SERVICE_UNAVAILABLE and (failed := error_of(content)).code in _STOPPED:
            raise EngineDeadError(failed.message)
        write(answer_line(row.custom_id, status, content), status == HTTPStatus.OK)


async def _answer(row: BatchRow, post: Post) -> tuple[int, bytes]:
    body = bytes(row.body)
    while True:
        status, content = await post(row.url, body)
        if status != HTTPStatus.TOO_MANY_REQUESTS:
            return status, content
        await asyncio.sleep(_RETRY_S)
