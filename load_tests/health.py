"""Measures how long `/health` takes, again and again. This shows whether anything blocks the event loop."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection

import httpx

_PRIORITY = -10


class HealthWatch:
    """Asks `/health` over one connection every `interval_s`, from when it is made until `stop`.

    It runs in a process of its own, because in this one its answers would wait behind those of other clients.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], interval_s: float) -> None:
        context = get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_ask, args=(base_url, dict(headers), interval_s, other), daemon=True)
        self._process.start()
        other.close()
        self._receive()  # it has begun
        self.asked: list[float] = []  # when each was, on `perf_counter`; known after `stop`

    def stop(self) -> list[float]:
        """The latencies of all answers in milliseconds. Raises httpx.HTTPError if one failed, or was not 200."""
        self._connection.send(None)
        asked = self._receive()
        self.asked = list(asked)
        return list(asked.values())

    def _receive(self) -> dict[float, float]:
        try:
            result: dict[float, float] | httpx.HTTPError = self._connection.recv()
        except EOFError:
            raise httpx.TransportError("the process that asks /health has ended") from None
        if isinstance(result, httpx.HTTPError):
            raise result
        return result


def _ask(base_url: str, headers: Mapping[str, str], interval_s: float, asked_by: Connection) -> None:
    latencies: dict[float, float] = {}
    with contextlib.suppress(OSError):  # who may not waits for a processor at times, which counts as the server's time
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    asked_by.send(latencies)
    try:
        with httpx.Client(base_url=base_url, headers=headers, timeout=120) as client:
            while not asked_by.poll(interval_s):
                asked = time.perf_counter()
                client.get("/health").raise_for_status()
                latencies[asked] = (time.perf_counter() - asked) * 1e3
        asked_by.send(latencies)
    except httpx.HTTPError as error:
        # As text: an exception with a request in it does not travel.
        asked_by.send(httpx.TransportError(f"/health: {error!r}"))
