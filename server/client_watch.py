"""client_watch: notices that a client hangs up while its answer is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Receive


@contextmanager
def client_watch(receive: Receive, on_gone: Callable[[], object]) -> Iterator[None]:
    """Calls `on_gone` if the client hangs up within the block. The body must have been read before."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
