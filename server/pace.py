"""Paces: work on the event loop that leaves it to others every few milliseconds, however much of it there is."""

from __future__ import annotations

import asyncio
import heapq
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Generator, Set
from itertools import count
from typing import Any, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from .local_path import local_path

T = TypeVar("T")

_TURN_S = 0.004  # of all requests together, in a turn of the event loop
_AT_ONCE = 16  # steps that may go on in a turn; if they are long, some wait for the next one

_BATCH_TURN_S = 0.002
_LATE_S = 0.002  # that the event loop comes back after a pause: others keep it busy
_MORE = 8


class Pace(ABC):
    """Runs coroutines for a limited time in all, and then lets others have their turn.

    What a coroutine does between two waits is a step. Each step waits for its turn, so it does not matter how much of
    the work waits for something: work that never waits leaves the event loop to others as well.
    """

    def __init__(self) -> None:
        self._worked_s = 0.0  # in this turn

    @types.coroutine
    def run(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Await this to run `work`. Cancelling it cancels `work`."""
        thrown: BaseException | None = None
        while True:
            try:
                if self._must_wait():
                    yield from self._turn().__await__()
            except BaseException as error:
                thrown = error
            began = time.perf_counter()
            try:
                awaited = work.send(None) if thrown is None else work.throw(thrown)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                thrown = None  # whose frames know it: only a collection of garbage could free them
                self._note(time.perf_counter() - began)
            try:
                yield awaited  # which wakes the task that runs this
            except BaseException as error:
                thrown = error

    def _note(self, seconds: float) -> None:
        """A step has taken this time."""
        self._worked_s += seconds

    @abstractmethod
    def _must_wait(self) -> bool:
        """Whether the next step has to wait for its turn."""

    @abstractmethod
    async def _turn(self) -> None:
        """Wait for it."""


class RequestPace(Pace):
    """A pace of 4 ms in each turn of the event loop, whose other steps wait for the next one in the order of coming.

    Thirty requests that come at the same time, or whose answers end with the same step of the engine, would otherwise
    keep the event loop from everything else until the last of them has been seen to.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # a heap
        self._numbers = count()
        self._due_on: asyncio.AbstractEventLoop | None = None  # where the next turn is to begin

    def _must_wait(self) -> bool:
        return self._worked_s >= _TURN_S or bool(self._waiting)

    async def _turn(self) -> None:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        while True:
            place = loop.create_future()
            heapq.heappush(self._waiting, (number, place))
            self._want_next()
            await place
            if self._worked_s < _TURN_S:
                return

    def _note(self, seconds: float) -> None:
        super()._note(seconds)
        self._want_next()

    def _want_next(self) -> None:
        loop = asyncio.get_running_loop()
        if self._due_on is not loop:
            self._due_on = loop
            loop.call_soon(self._begin_next)

    def _begin_next(self) -> None:
        self._worked_s, self._due_on = 0.0, None
        for _ in range(min(_AT_ONCE, len(self._waiting))):
            _, place = heapq.heappop(self._waiting)
            if not place.done():
                place.set_result(None)
        if self._waiting:
            self._want_next()


class BatchPace(Pace):
    """A pace of 2 ms at a time, and a pause for as long after each of these turns, or for eight times as long while the
    event loop is busy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_order = asyncio.Lock()
        self._is_busy = False

    def _must_wait(self) -> bool:
        return self._worked_s >= _BATCH_TURN_S or self._in_order.locked()

    async def _turn(self) -> None:
        async with self._in_order:
            if self._worked_s >= _BATCH_TURN_S:
                pause = self._worked_s * (_MORE if self._is_busy else 1)
                due = time.perf_counter() + pause
                await asyncio.sleep(pause)
                self._is_busy = time.perf_counter() - due > _LATE_S
                self._worked_s = 0.0


class Paced:
    """Answers requests at one pace, except those for `open_paths`, which are answered at once."""

    def __init__(self, app: ASGIApp, open_paths: Set[str]) -> None:
        self.app = app
        self._open_paths = open_paths
        self._pace = RequestPace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered: Any = self.app(scope, receive, send)
        if scope["type"] == "http" and local_path(scope) not in self._open_paths:
            answered = self._pace.run(answered)
        await answered
