"""Repeatedly measures how long `/health` takes. This shows whether anything blocks the event loop."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import httpx

_PRIORITY = -10


class Answer(NamedTuple):
    """When `/health` was requested, on `perf_counter`, and how long it took. Of that time, the event loop's thread ran
    for `ran_ms` and waited for a core for `waited_ms`; for the rest, other threads held the GIL.
    """

    asked: float
    latency_ms: float
    ran_ms: float
    waited_ms: float


class HealthWatch:
    """Requests `/health` over one connection every `interval_s`, from its construction until `stop`.

    It runs in a process of its own, because in this one its answers would wait behind those of other clients. With the
    server's `pid`, of this machine, it also looks at what the event loop's thread does meanwhile.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], interval_s: float, pid: int | None = None) -> None:
        context = get_context("spawn")
        self._connection, other = context.Pipe()
        arguments = (base_url, dict(headers), interval_s, pid, other)
        self._process = context.Process(target=_ask, args=arguments, daemon=True)
        self._process.start()
        other.close()
        self._receive()  # it has begun
        self.answers: list[Answer] = []  # known after `stop`

    def stop(self) -> list[float]:
        """The latencies of all answers in milliseconds. Raises httpx.HTTPError if one failed, or was not 200."""
        self._connection.send(None)
        self.answers = self._receive()
        return [answer.latency_ms for answer in self.answers]

    def _receive(self) -> list[Answer]:
        try:
            result: list[Answer] | httpx.HTTPError = self._connection.recv()
        except EOFError:
            raise httpx.TransportError("the process that asks /health has ended") from None
        if isinstance(result, httpx.HTTPError):
            raise result
        return result


def _ask(base_url: str, headers: Mapping[str, str], interval_s: float, pid: int | None, asked_by: Connection) -> None:
    answers: list[Answer] = []
    with contextlib.suppress(OSError):  # else it may wait for a core, which counts as the server's time
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    asked_by.send(answers)
    try:
        with httpx.Client(base_url=base_url, headers=headers, timeout=120) as client:
            while not answers or not asked_by.poll(interval_s):
                ran, waited = _thread_ms(pid)
                asked = time.perf_counter()
                client.get("/health").raise_for_status()
                latency_ms = (time.perf_counter() - asked) * 1e3
                ran_until, waited_until = _thread_ms(pid)
                answers.append(Answer(asked, latency_ms, ran_until - ran, waited_until - waited))
        asked_by.send(answers)
    except httpx.HTTPError as error:
        # As text, because an exception that contains a request cannot be pickled.
        asked_by.send(httpx.TransportError(f"/health: {error!r}"))


def _thread_ms(pid: int | None) -> tuple[float, float]:
    """How long a process's main thread has run so far, and waited for a core."""
    if pid is None:
        return 0, 0
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran) / 1e6, int(waited) / 1e6
