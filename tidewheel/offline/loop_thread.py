"""LoopThread: an event loop in a thread, for callers that have none, or one of their own such as a notebook's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from tidewheel.server.http.event_loop import choose_loop

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads until it is closed."""

    def __init__(self) -> None:
        if choose_loop() == "uvloop":
            import uvloop

            self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        else:
            self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="tidewheel-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If the waiting thread is interrupted, `work` is cancelled and ends first."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """End the thread. Nothing may run any more."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
