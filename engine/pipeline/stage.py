"""The process of a stage: it loads its layers, then runs the steps that come to it and passes them on.

Whatever happens to the process that started it, it ends: a thread waits for the end of that process's socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from msgspec import Struct

from ..devices.base import ExecutorOptions
from ..devices.batch import SamplingBatch, StepOutput
from ..errors import DeviceError, TidewheelError
from ..load_progress import ReportedWeights
from ..models.spec import StageSpec, stage_tensors
from ..opened_model import open_model
from ..options import EngineOptions
from .links import (
    COPY_BLOCKS,
    COPY_STATES,
    FAILED,
    STEP,
    failed_message,
    read_copies,
    read_step,
    receive,
)
from .stage_weights import StageWeights
from .step_slot import StepSlot

if TYPE_CHECKING:
    from ..devices.cpu.device import CpuDevice
    from ..devices.cpu.executor import CpuExecutor
    from ..load_progress import LoadProgress

_REPORTED = 0.01  # of the weights, at least, between two reports


class StageStart(Struct, frozen=True):
    """What a stage is told at its start. The numbers of descriptors are the same in both processes.

    `upstream` is where steps come from, and `downstream` where they go. On `masks` the last stage hears that the masks
    of a step are written. `options` are those of the model, as `executor_options` are: each stage makes the limits of
    the whole of them.
    """

    options: EngineOptions
    executor_options: ExecutorOptions
    stage: StageSpec
    index: int
    cpus: Sequence[int]
    upstream: int
    downstream: int
    masks: int
    slots: Sequence[int]
    num_groups: int
    num_stages: int
    row_floats: int


def main() -> None:
    """Run the stage whose starter has the other end of the socket that the first argument names."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the starter gets them too, and ends its requests first
        signal.signal(number, signal.SIG_IGN)
    starter = _Starter(Connection(int(sys.argv[1])))
    start = starter.start
    try:
        executor = _load(start, starter)
    except TidewheelError as error:
        starter.tell("error", str(error))
        return
    except Exception as error:
        logging.getLogger(__name__).exception("A stage could not be loaded")
        starter.tell("error", f"{type(error).__name__}: {error}")
        return
    starter.finish(executor.native.weight_bytes, executor.native.cache_bytes)
    try:
        _Stage(start, executor).run()
    finally:
        executor.close()


class _Starter:
    """The process that started this one. This process ends with it, at once."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
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

    def finish(self, *message: Any) -> None:
        """Say that all is loaded; what is logged from now on goes to stderr."""
        root = logging.getLogger()
        root.removeHandler(self._handler)
        logging.basicConfig(format=f"pipeline stage {self.start.index + 1}: %(levelname)s %(message)s")
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


class _Reports:
    """Tells the starter how far loading is. It takes the place of a LoadProgress."""

    def __init__(self, starter: _Starter) -> None:
        self._starter, self._reported = starter, 0.0

    def report(self, fraction: float) -> None:
        """That much of the whole model was read here, 0 to 1."""
        if fraction - self._reported >= _REPORTED:
            self._reported = fraction
            self._starter.tell("progress", fraction)


def _load(start: StageStart, starter: _Starter) -> CpuExecutor:
    logging.disable(logging.WARNING)  # the starter has said it already
    model = open_model(start.options)
    logging.disable(logging.NOTSET)
    device = cast("CpuDevice", model.device).bound_to(start.cpus)
    weights = StageWeights(model.weights, stage_tensors(model.spec, start.stage))
    reported = ReportedWeights(weights, model.spec, cast("LoadProgress", _Reports(starter)))
    return device.load_stage(model.spec, reported, start.executor_options, start.stage)


class _Stage:
    """Runs steps until no more can come."""

    def __init__(self, start: StageStart, executor: CpuExecutor) -> None:
        self._index, self._stage = start.index, start.stage
        self._executor, self._native = executor, executor.native
        self._upstream, self._downstream = (socket.socket(fileno=fd) for fd in (start.upstream, start.downstream))
        self._masks = socket.socket(fileno=start.masks) if start.masks >= 0 else None
        shape = start.num_groups, start.num_stages, start.row_floats
        self._slots = [StepSlot(*shape, fd) for fd in start.slots]
        self._nothing = SamplingBatch.greedy([]), np.empty(0, np.int32)
        self._step = 0  # the number of the step that runs
        self._masks_of = 0  # the last one whose masks were written

    def run(self) -> None:
        """Return when the stage before this one, or the starter, has gone."""
        self._native.pin_caller()
        while message := receive(self._upstream):
            try:
                said = self._take(message)
            except (DeviceError, ValueError, MemoryError) as error:
                said = failed_message(
                    f"pipeline stage {self._index + 1} ({self._stage}): {str(error) or 'out of memory'}"
                )
            try:
                if said:
                    self._downstream.send(said)
            except (BrokenPipeError, ConnectionResetError):
                return

    def _take(self, message: bytes) -> bytes:
        """Do what a message says; what to say downstream."""
        kind = message[0]
        if kind == STEP:
            self._run_step(*read_step(message))
        elif kind == COPY_BLOCKS:
            self._executor.copy_blocks(*read_copies(message))
        elif kind == COPY_STATES:
            if self._native.has_states:
                self._executor.copy_states(read_copies(message)[0])
        else:
            assert kind == FAILED
        return message if kind in (STEP, FAILED) or not self._stage.is_last else b""

    def _run_step(self, slot_index: int, number: int, size: int) -> None:
        started = time.perf_counter()
        self._step = number
        slot = self._slots[slot_index]
        arrays = slot.read(size)
        times, rows = arrays["times"], arrays["rows"]
        assert times is not None
        times[self._index, 0] = started
        batch, output = slot.batch(arrays, self._await_masks), slot.output(arrays)
        if not self._stage.is_last:
            batch.sampling, batch.logits_rows = self._nothing
            output = StepOutput(self._nothing[1])
        if not self._native.has_states:
            batch.state_slots = batch.num_guesses = None
        self._executor.run_into(output, batch, rows)
        times[self._index, 1] = time.perf_counter()

    def _await_masks(self) -> None:
        assert self._masks is not None
        while self._masks_of < self._step:
            message = receive(self._masks)
            if not message:
                raise DeviceError("the server has gone")
            self._masks_of = int.from_bytes(message, "little")
