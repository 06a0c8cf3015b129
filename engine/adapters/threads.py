"""Work in threads that a server which ends does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """The result of `work`. A server that ends does not wait for the thread, as it would for a pool's thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: list[T], failure: BaseException | None) -> None:
        if future.cancelled():
            return
        if failure is None:
            future.set_result(result[0])
        else:
            future.set_exception(failure)
            future.exception()  # the caller may have gone

    def run(finish: Callable[[list[T], BaseException | None], None]) -> None:
        result: list[T] = []
        failure = None
        try:
            result.append(work())
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(finish, result, failure)
        del finish, failure  # whose traceback knows this frame: only a collection of garbage could free what has failed

    threading.Thread(target=run, args=(finish,), name=name, daemon=True).start()
    return future
