"""When Python's garbage collector runs: a collection stops all threads of the process, and with them all streams."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

_YOUNG = 2_000  # objects made since the last collection; to look at them takes up to two milliseconds on a busy core
_NEVER = 1_000_000_000
_PAUSE_S = 10.0  # between two collections of what has been made meanwhile, and lives on
_PAUSE_RATIO = 1000  # of the pause between two collections of all objects to the processor time that the last one took

_num_running = 0
_thresholds = gc.get_threshold()
_due = 0.0  # the next collection of all objects, on perf_counter


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect nothing during a start: nearly all objects that it makes stay.

    So no collection has to walk them, neither then nor later while streams wait.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def large_value() -> Iterator[None]:
    """Collect nothing while one large value is made: its parts become garbage only together."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def collect_seldom() -> None:
    """Until it is cancelled, let Python collect young objects alone, and others every now and then: those that have
    lived on since the last time, and seldom all of them.

    Python itself collects all of them whenever their number has grown by a quarter. A long conversation that is
    translated and rendered makes so many that this stopped the streams for 40 to 130 ms, up to once a second. Servers
    in one process share its collections.
    """
    import asyncio  # a start uses this module before it loads a model, and has no event loop then

    global _num_running, _thresholds
    if not _num_running:
        _thresholds = gc.get_threshold()
        gc.set_threshold(_YOUNG, _NEVER, _NEVER)
    _num_running += 1
    try:
        while True:
            await asyncio.sleep(_PAUSE_S)
            _collect_if_due()
    finally:
        _num_running -= 1
        if not _num_running:
            gc.set_threshold(*_thresholds)


def _collect_if_due() -> None:
    global _due
    if time.perf_counter() < _due:
        gc.collect(1)
        return
    began = time.thread_time()
    gc.collect()
    _due = time.perf_counter() + _PAUSE_RATIO * (time.thread_time() - began)
