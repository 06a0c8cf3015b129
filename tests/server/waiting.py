"""Waiting for what a server does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable

from server.conftest import RunningServer


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def is_idle(server: RunningServer) -> bool:
    stats = server.engine.stats()
    return not stats.num_running and not stats.num_waiting
