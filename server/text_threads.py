"""TextThreads: where long texts and answers are handled, so that they do not delay the tokens of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

INLINE_BYTES = 4096  # encoding this much takes some hundred microseconds


class TextThreads:
    """Runs work on texts: at once if it is short, in a thread otherwise."""

    # One huge text does not delay all other long ones. Not more, because the engine needs the cores.
    num_threads = 2

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(self.num_threads, "prompt-encoder")

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`, which runs at once if its input is small, and in a thread otherwise."""
        if size_bytes <= INLINE_BYTES:
            return work()
        return await self.run_in_thread(work)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """The result of `work`, which runs in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
