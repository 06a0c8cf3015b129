"""Requests that come at the same time, or go on at the same time, leave the event loop to everything else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from tidewheel.server.pace import Paced, RequestPace

WORK_S = 0.001  # at least, for each step
COUNT = 40


def work() -> None:
    time.sleep(WORK_S)  # which holds up the event loop


async def done_between_others(run: Callable[[Callable[[], None]], Awaitable[Any]]) -> list[int]:
    """How many times `run` has called the function that it is given, between each two turns of something else."""
    counts = [0]

    def note() -> None:
        counts[-1] += 1

    async def others() -> None:
        while True:
            await asyncio.sleep(0)
            counts.append(0)

    other = asyncio.create_task(others())
    await run(note)
    other.cancel()
    return counts


@pytest.mark.parametrize("waits", [False, True])
def test_few_steps_between_two_moments_of_others(waits: bool) -> None:
    order: list[int] = []

    async def run(note: Callable[[], None]) -> None:
        pace, together = RequestPace(), asyncio.Event()

        async def request(number: int) -> int:
            if waits:
                await together.wait()
            work()
            note()
            order.append(number)
            return number

        tasks = [asyncio.ensure_future(pace.run(request(i))) for i in range(COUNT)]
        await asyncio.sleep(0.01)
        together.set()
        assert await asyncio.gather(*tasks) == list(range(COUNT))

    counts = asyncio.run(done_between_others(run))
    assert sum(counts) == COUNT
    assert max(counts) <= 5
    assert order == list(range(COUNT))


def test_one_that_never_waits_long_leaves_the_loop_to_others() -> None:
    async def run(note: Callable[[], None]) -> None:
        async def request() -> None:
            for _ in range(COUNT):
                work()
                note()
                await asyncio.sleep(0)

        await RequestPace().run(request())

    assert max(asyncio.run(done_between_others(run))) <= 5


def test_cancelling_reaches_those_that_wait_for_their_turn() -> None:
    ended: list[int] = []

    async def request(number: int) -> None:
        work()
        try:
            await asyncio.sleep(0)
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    async def run() -> None:
        pace = RequestPace()
        tasks = [asyncio.ensure_future(pace.run(request(i))) for i in range(COUNT)]
        while not ended:
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert await pace.run(answer()) == "answer"  # nobody is left before it

    async def answer() -> str:
        return "answer"

    asyncio.run(run())


def test_what_fails_raises_its_own_error() -> None:
    async def request() -> None:
        await asyncio.sleep(0)
        raise ValueError("no answer")

    with pytest.raises(ValueError, match="no answer"):
        asyncio.run(_run(RequestPace(), request()))


def test_one_pace_serves_one_event_loop_after_another() -> None:
    pace = RequestPace()

    async def request() -> int:
        work()
        return 1

    for _ in range(10):
        assert asyncio.run(_run(pace, request())) == 1


def test_probes_do_not_wait_for_other_requests() -> None:
    answered: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        work()
        answered.append(scope["path"])

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    async def run() -> None:
        paced = Paced(app, frozenset({"/health"}))
        paths = ["/v1/completions"] * COUNT + ["/health"]
        await asyncio.gather(*(paced({"type": "http", "path": path}, receive, send) for path in paths))

    asyncio.run(run())
    assert answered.index("/health") <= 5
    assert len(answered) == COUNT + 1


async def _run(pace: RequestPace, work: Any) -> Any:
    return await pace.run(work)
