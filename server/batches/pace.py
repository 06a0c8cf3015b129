"""Pace: work on the event loop that leaves most of it to others."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")

_TURN_S = 0.002
_LATE_S = 0.002  # that the event loop comes back after a pause: others keep it busy
_MORE = 8


class Pace:
    """Runs coroutines for 2 ms at a time in all, and pauses for as long after each of these turns, or for eight times
    as long while the event loop is busy.

    What a coroutine does between two waits is a step. Each step waits for its turn, so it does not matter how much of
    the work waits for something: work that never waits leaves the event loop to others as well.
    """

    def __init__(self) -> None:
        self._in_order = asyncio.Lock()
        self._worked_s = 0.0  # since the last pause
        self._is_busy = False

    @types.coroutine
    def run(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Await this to run `work`. Cancelling it cancels `work`."""
        thrown: BaseException | None = None
        while True:
            try:
                yield from self._turn().__await__()
            except BaseException as error:
                thrown = error
            began = time.perf_counter()
            try:
                awaited = work.send(None) if thrown is None else work.throw(thrown)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                self._worked_s += time.perf_counter() - began
            thrown = None
            try:
                yield awaited  # which wakes the task that runs this
            except BaseException as error:
                thrown = error

    async def _turn(self) -> None:
        async with self._in_order:
            if self._worked_s >= _TURN_S:
                pause = self._worked_s * (_MORE if self._is_busy else 1)
                due = time.perf_counter() + pause
                await asyncio.sleep(pause)
                self._is_busy = time.perf_counter() - due > _LATE_S
                self._worked_s = 0.0
