"""When Python's garbage collector runs: a collection stops all threads of the process, and with them all streams."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator

_YOUNG = 10_000  # objects made since the last collection; to look at them takes about a millisecond
_NEVER = 1_000_000_000
_LARGE = 100_000  # objects made at once
_MIN_PAUSE_S = 10.0
_PAUSE_RATIO = 200  # of the time between two whole collections to what one takes

_has_frozen = False


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect nothing within a start: nearly all that it makes stays.

    No collection need walk it then, nor later while streams wait.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def large_value() -> Iterator[None]:
    """Collect nothing while one large value is made, of which hardly any is garbage before all of it is.

    Where it has very many objects, no collection walks them later either.
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
    translated and rendered makes so many that this stopped the streams for 40 to 130 ms, up to once a second.
    """
    import asyncio  # a start uses this module before it loads a model, and has no event loop then

    thresholds = gc.get_threshold()
    gc.set_threshold(_YOUNG, _NEVER, _NEVER)
    pause = _MIN_PAUSE_S
    try:
        while True:
            await asyncio.sleep(pause)
            began = time.perf_counter()
            _collect()
            pause = max(_MIN_PAUSE_S, _PAUSE_RATIO * (time.perf_counter() - began))
    finally:
        gc.set_threshold(*thresholds)


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
