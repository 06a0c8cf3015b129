"""PipelineExecutor: a model whose layers run in several processes, one step after the other through all of them."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..devices.base import ExecutorLimits
from ..devices.batch import StepBatch, StepOutput, TokenMasks
from ..errors import DeviceError
from .links import COPY_BLOCKS, COPY_STATES, FAILED, copy_messages, read_failure, read_step, receive, step_message
from .processes import StageProcesses
from .stage_times import StageTimes
from .step_slot import Arrays, StepSlot

logger = logging.getLogger(__name__)

_SLOW_S = 10.0  # that a step may take before the stage where it is is named


class PipelineExecutor:
    """Gives steps to the first stage and takes what they gave from the last one.

    Up to a step for each stage may be started before the first of them is waited for. They are waited for in order.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        vocab_size: int,
        processes: StageProcesses,
        slots: Sequence[StepSlot],
        first: socket.socket,
        last: socket.socket,
        masks: socket.socket,
    ) -> None:
        """Owns all that it is given. `first` leads to the first stage, and from `last` comes what the last one says."""
        self.limits = limits
        self._vocab_size = vocab_size
        self._processes, self._slots = processes, slots
        self._first, self._last, self._masks = first, last, masks
        self._last.settimeout(_SLOW_S)
        self._free = deque(range(len(slots)))
        self._number = 0
        self._times = StageTimes([processes.name(i) for i in range(len(processes.stages))])
        self._closed = False

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Nothing: kernels are compiled, and threads run since the load."""

    def start(self, batch: StepBatch) -> _PipelineStep:
        """Give the batch to the first stage. It may be changed afterwards, but for the bits of its masks."""
        index, self._number = self._free.popleft(), self._number + 1
        size, arrays = self._slots[index].write(batch, self._vocab_size)
        self._say(step_message(index, self._number, size))
        return _PipelineStep(self, index, self._number, arrays, batch.sampling.masks)

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """Have all stages copy KV blocks, `pairs[i] = (from, to)`, between the steps before and those to come."""
        for message in copy_messages(COPY_BLOCKS, pairs, group):
            self._say(message)

    def copy_states(self, pairs: NDArray[np.int32]) -> None:
        """Likewise for recurrent state, one after the other."""
        for message in copy_messages(COPY_STATES, pairs):
            self._say(message)

    def hand_over(self, num_tokens: int) -> Callable[[], None] | None:
        """Nothing: no thread of this process computes."""
        return None

    def close(self) -> None:
        """End the processes and give back the memory that they share."""
        if not self._closed:
            self._closed = True
            for link in (self._first, self._last, self._masks):
                link.close()
            self._processes.close()
            for slot in self._slots:
                slot.close()

    def end_step(self, slot: int, number: int, arrays: Arrays, masks: TokenMasks | None) -> StepOutput:
        """Wait for a step that was started. Raises DeviceError, naming the stage, if one has ended or failed."""
        if masks is not None:
            masks.wait()
            bits = arrays["masks"]
            assert bits is not None
            bits[...] = masks.bits
            self._send(self._masks, number.to_bytes(8, "little"))
        message = self._receive(arrays)
        if message[0] == FAILED:
            raise DeviceError(read_failure(message))
        assert read_step(message)[:2] == (slot, number), "steps end in another order than they were started in"
        output = self._slots[slot].output(arrays)
        ended = output.copy()
        times = arrays["times"]
        assert times is not None
        self._times.observe(times[:, 1] - times[:, 0])
        self._free.append(slot)
        return ended

    def _receive(self, arrays: Arrays) -> bytes:
        started = time.perf_counter()
        while True:
            try:
                message = receive(self._last)
            except TimeoutError:
                self._say_where(arrays, time.perf_counter() - started)
                continue
            if not message:
                raise DeviceError(self._processes.failure())
            return message

    def _say_where(self, arrays: Arrays, seconds: float) -> None:
        times = arrays["times"]
        assert times is not None
        index = next((i for i, (_, ended) in enumerate(times) if not ended), len(times) - 1)
        process = self._processes.stages[index].process
        logger.warning(
            "A step has taken %.0f s so far: it is at %s, process %d", seconds, self._processes.name(index), process.pid
        )

    def _say(self, message: bytes) -> None:
        self._send(self._first, message)

    def _send(self, link: socket.socket, message: bytes) -> None:
        try:
            link.send(message)
        except OSError as error:
            raise DeviceError("this executor was closed" if self._closed else self._processes.failure()) from error


class _PipelineStep:
    """A step that was started."""

    def __init__(
        self, executor: PipelineExecutor, slot: int, number: int, arrays: Arrays, masks: TokenMasks | None
    ) -> None:
        self._executor, self._step = executor, (slot, number, arrays, masks)

    def wait(self) -> StepOutput:
        """What the step gave, once. Raises DeviceError."""
        return self._executor.end_step(*self._step)
