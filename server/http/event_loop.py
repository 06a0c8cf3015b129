"""The event loop: uvloop's, or asyncio's own on machines for which uvloop has no wheels."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def choose_loop() -> Literal["uvloop", "asyncio"]:
    """The event loop to serve on, by uvicorn's name for it. If uvloop is missing, the log says so."""
    try:
        import uvloop  # noqa: F401 - takes a while, which a server that asks early spends while its weights are loaded
    except ModuleNotFoundError:
        logger.info("uvloop is not installed: using asyncio's own event loop, which needs more CPU time")
        return "asyncio"
    return "uvloop"


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the event loop that the server uses, like `asyncio.run`."""
    if choose_loop() == "asyncio":
        return asyncio.run(main)
    import uvloop

    return uvloop.run(main)
