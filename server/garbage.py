"""When Python's garbage collector runs: a collection stops all threads of the process, and with them all streams."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

_YOUNG = 10_000  # objects made since the last collection; to look at them takes about a millisecond
_NEVER = 1_000_000_000
_LARGE = 100_000  # objects made at once
_PAUSE_S = 10.0  # at least, between two collections of all objects
_PAUSE_RATIO = 200  # of that pause to what the last collection took

_has_frozen = False
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
    """Collect nothing while one large value is made: its parts become garbage only together.

    If it has very many objects, no collection walks them later either.
    """
    global _has_frozen
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _LARGE:
            gc.freeze()
            _has_frozen = True
        gc.enable()


async def collect_seldom() -> None:
    """Until it is cancelled, let Python collect young objects alone, and all others every now and then.

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
    began = time.perf_counter()
    if began >= _due:
        _collect()
        ended = time.perf_counter()
        _due = ended + _PAUSE_RATIO * (ended - began)


def _collect() -> None:
    global _has_frozen
    if not _has_frozen:
        gc.collect()
        return
    # Cycles may have been frozen with a large value.
    _has_frozen = False
    gc.unfreeze()
    gc.collect()
    gc.freeze()
