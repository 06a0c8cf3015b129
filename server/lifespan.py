"""The lifespan of an application: what starts and stops with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from starlette.applications import Starlette

from .garbage import collect_seldom

if TYPE_CHECKING:
    from .api.batches import Batches


class Startable(Protocol):
    """What computes the answers."""

    def start(self) -> None:
        """Called once, on the running event loop."""

    async def stop(self) -> None:
        """Called once, when no batches run any more."""


def lifespan_of(
    engines: Startable, batches: Batches | None, close: Callable[[], Awaitable[None]]
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """Starts the engines, and then the batches, which ask the application. `close` is called when both have stopped."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engines.start()
        if batches is not None:
            batches.start(app)
        collections = asyncio.create_task(collect_seldom())
        try:
            yield
        finally:
            collections.cancel()
            if batches is not None:
                await batches.stop()
            await engines.stop()
            await close()

    return lifespan
