"""Notices models that come into the folder of models or leave it, while the server runs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from tidewheel.engine.errors import TidewheelError

from .catalog import Changes
from .ollama_store import MANIFESTS

logger = logging.getLogger(__name__)

_DEPTH = 2  # of the folders in it: owner/name, and the snapshots of a repository in the hub's cache
_OLLAMA_DEPTH = 3  # of the folders of its manifests: HOST/NAMESPACE/MODEL


async def watch_folder(folder: str, rescan: Callable[[], Awaitable[Changes]], period_s: float = 10.0) -> None:
    """Rescan whenever something has come into the folder, or left it. Goes on until it is cancelled.

    Only the times of folders are looked at, which takes little even of a thousand models.
    """
    before = await asyncio.to_thread(_all_times, folder)
    while True:
        await asyncio.sleep(period_s)
        now = await asyncio.to_thread(_all_times, folder)
        if now == before:
            continue
        before = now
        try:
            changes = await rescan()
        except TidewheelError as error:
            logger.warning("The models stay as they are: %s", error)
            continue
        for entry in changes.removed:
            logger.info("The model %s is no longer in %s, or has changed", entry.name, folder)
        for entry in changes.added:
            logger.info("Found the model %s%s", entry.name, f", which is broken: {entry.error}" if entry.error else "")


def _all_times(folder: str) -> dict[str, int]:
    folder = os.path.expanduser(folder)
    times = _times(folder)
    for name in MANIFESTS:
        times |= _times(os.path.join(folder, name), _OLLAMA_DEPTH)
    return times


def _times(folder: str, depth: int = _DEPTH) -> dict[str, int]:
    """When each folder in it was last changed, in nanoseconds, by path. One that cannot be read is left out."""
    times: dict[str, int] = {}
    try:
        times[folder] = os.stat(folder).st_mtime_ns
        with os.scandir(folder) as files:
            inner = [file.path for file in files if depth and not file.name.startswith(".") and file.is_dir()]
    except OSError:
        return times
    for path in inner:
        times |= _times(path, depth - 1)
    return times
