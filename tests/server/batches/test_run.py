"""Rows of a batch, of any kind, leave the event loop to other requests."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus

import msgspec
import pytest

from tidewheel.server.batches.rows import BatchRow
from tidewheel.server.batches.run import run_rows
from tidewheel.server.pace import BatchPace

WORK_S = 0.001  # at least, for each row


def rows(count: int, url: str = "/v1/completions") -> list[BatchRow]:
    return [BatchRow(f"r{i}", url, msgspec.Raw(b"{}")) for i in range(count)]


def work() -> None:
    time.sleep(WORK_S)  # which holds up the event loop


@pytest.mark.parametrize("waits", [False, True])
def test_no_more_than_a_turn_of_work_between_two_moments_of_others(waits: bool) -> None:
    at_once: list[int] = [0]

    async def post(path: str, body: bytes) -> tuple[int, bytes]:
        if waits:
            await asyncio.sleep(0.01)  # so that the rows end together
        work()
        at_once[-1] += 1
        return HTTPStatus.OK, b"{}"

    async def others() -> None:
        while True:
            await asyncio.sleep(0)
            at_once.append(0)

    async def both() -> None:
        other = asyncio.create_task(others())
        await run_rows(rows(100), post, lambda line, ok: None, concurrency=50, pace=BatchPace())
        other.cancel()

    asyncio.run(both())
    assert sum(at_once) == 100
    assert max(at_once) <= 3


def test_whoever_stops_a_batch_stops_its_requests() -> None:
    ended: list[str] = []
    started = asyncio.Semaphore(0)

    async def post(path: str, body: bytes) -> tuple[int, bytes]:
        started.release()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(path)
        raise AssertionError

    async def stop() -> None:
        running = asyncio.create_task(run_rows(rows(9), post, lambda line, ok: None, concurrency=4, pace=BatchPace()))
        for _ in range(4):
            await started.acquire()
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(stop())
    assert ended == ["/v1/completions"] * 4


def test_what_fails_ends_the_others() -> None:
    async def post(path: str, body: bytes) -> tuple[int, bytes]:
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        asyncio.run(run_rows(rows(9), post, lambda line, ok: None, concurrency=4, pace=BatchPace()))
