"""The process of a stage: it loads its layers, then runs the steps that come to it and passes them on.

It ends when the process that started it ends, in any way: a thread waits for the end of that process's socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

from msgspec import Struct

from ...adapters.registry import give_way
from ...errors import DeviceError, TidewheelError
from ...pipeline.links import LocalLink
from ...pipeline.runner import LoadedLayers, StageRunner
from ...pipeline.stage_plan import StagePlan
from .layers import load_stage

_REPORTED = 0.01  # of the weights, at least, between two reports


class StageStart(Struct, frozen=True):
    """What a process gets at its start: its stage, its groups of processors, and descriptors, which have the same
    numbers in both processes.

    Steps come from `upstream` and go to `downstream`. `masks` tells the last stage that the masks of a step are
    written, and `adapters` brings each stage its adapters.
    """

    plan: StagePlan
    groups: Sequence[Sequence[int]]
    upstream: int
    downstream: int
    masks: int
    slots: Sequence[int]
    adapters: int


def main() -> None:
    """Run the stage whose starter has the other end of the socket that the first argument names."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the starter gets them too, and ends its requests first
        signal.signal(number, signal.SIG_IGN)
    starter = _Starter(Connection(int(sys.argv[1])))
    start = starter.start
    try:
        loaded = load_stage(start.plan, start.groups, starter.report)
    except TidewheelError as error:
        starter.tell("error", str(error))
        return
    except Exception as error:
        logging.getLogger(__name__).exception("A stage could not be loaded")
        starter.tell("error", f"{type(error).__name__}: {error}")
        return
    starter.finish(loaded.weight_bytes, loaded.cache_bytes)
    upstream, downstream = (LocalLink(socket.socket(fileno=fd)) for fd in (start.upstream, start.downstream))
    masks = LocalLink(socket.socket(fileno=start.masks)) if start.masks >= 0 else None
    slots = [start.plan.shape.slot(fd) for fd in start.slots]
    taking = partial(_take_adapters, Connection(start.adapters), loaded)
    threading.Thread(target=taking, name="adapters", daemon=True).start()
    try:
        StageRunner(start.plan, loaded, slots, upstream, downstream, masks).run()
    finally:
        loaded.executor.close()


def _take_adapters(connection: Connection, loaded: LoadedLayers) -> None:
    """Load what comes, and answer with what is wrong, "" for nothing."""
    give_way()
    try:
        while True:
            number, adapter = connection.recv()
            try:
                loaded.executor.load_lora(number, adapter)
            except DeviceError as error:
                connection.send(str(error))
            else:
                connection.send("")
    except (EOFError, OSError):
        pass  # who gives adapters has gone
    except BaseException:  # nothing may wait for an answer that never comes
        logging.getLogger(__name__).exception("An adapter could not be loaded")
        os._exit(1)


class _Starter:
    """The process that started this one. This process ends with it, at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._reported = 0.0
        self.start = cast(StageStart, connection.recv())
        self._handler = _Forwarded(self)
        root = logging.getLogger()
        root.addHandler(self._handler)
        root.setLevel(logging.WARNING)
        threading.Thread(target=self._await_end, name="starter", daemon=True).start()

    def tell(self, *message: Any) -> None:
        """Send it, from any thread."""
        with self._lock:
            self._connection.send(message)

    def report(self, fraction: float) -> None:
        """`fraction` of the whole model was read here, 0 to 1."""
        if fraction - self._reported >= _REPORTED:
            self._reported = fraction
            self.tell("progress", fraction)

    def finish(self, *message: Any) -> None:
        """Say that all is loaded; what is logged from now on goes to stderr."""
        root = logging.getLogger()
        root.removeHandler(self._handler)
        logging.basicConfig(format=f"pipeline stage {self.start.plan.index + 1}: %(levelname)s %(message)s")
        self.tell("ready", *message)

    def _await_end(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            self._connection.recv()
        os._exit(0)


class _Forwarded(logging.Handler):
    """Gives what is logged to the starter's log."""

    def __init__(self, starter: _Starter) -> None:
        super().__init__()
        self._starter = starter

    def emit(self, record: logging.LogRecord) -> None:
        self._starter.tell("log", record.levelno, record.getMessage())
