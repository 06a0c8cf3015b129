"""The exit status of a scenario that looks for faults."""

from __future__ import annotations

import sys
from collections.abc import Callable

import httpx
from storm import StormError
from target import TargetError

_MAX_SHOWN = 20


def verdict(run: Callable[[], list[str]]) -> int:
    """Run it and print what was wrong to stderr. Returns 1 if anything was, otherwise 0."""
    try:
        wrong = run()
    except (StormError, TargetError, httpx.HTTPError) as error:
        wrong = [f"{type(error).__name__}: {error}"]
    for line in wrong[:_MAX_SHOWN]:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0
