"""Garbage collection while the server starts."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect nothing within: nearly all that a start makes stays.

    No collection need walk it then, nor later while streams wait.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
