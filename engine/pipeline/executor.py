"""PipelineExecutor: a model whose layers run in several processes, one step after the other through all of them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..cancellation import Cancellation
from ..devices.base import ExecutorLimits
from ..devices.batch import StepBatch, StepOutput, TokenMasks
from ..errors import DeviceError
from .links import (
    COPY_BLOCKS,
    COPY_STATES,
    FAILED,
    MASKS,
    Link,
    Part,
    copy_messages,
    read_failure,
    read_step,
    step_message,
)
from .restarts import Restarts
from .stage_times import PipelineStats, StageTimes
from .stages import Launch, Stages
from .step_slot import Arrays

logger = logging.getLogger(__name__)

_SLOW_S = 10.0  # that a step may take before the stage where it is is named


class PipelineExecutor:
    """Gives steps to the first stage and takes what they gave from the last one.

    Up to a step for each stage may be started before the first of them is waited for. They are waited for in order.
    When a stage has ended, all of them are started again: see RestartingExecutor.
    """

    def __init__(self, limits: ExecutorLimits, vocab_size: int, launch: Launch, cancellation: Cancellation) -> None:
        """Start the stages, which a `cancellation` ends. Raises DeviceError and LoadCancelledError."""
        self.limits = limits
        self._vocab_size = vocab_size
        self._launch, self._cancellation = launch, Cancellation()
        self._restarts = Restarts()
        self._on_end: Callable[[], None] | None = None
        self._number = 0
        self._is_closed = False
        self._stages: Stages | None = None
        stages = launch(cancellation)
        names = [stages.name(index) for index in range(len(stages.slots))]
        self._times = StageTimes(names, share_clock=stages.share_clock)
        self._begin(stages)

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Nothing: kernels are compiled, and threads run since the load."""

    def start(self, batch: StepBatch) -> _PipelineStep:
        """Give the batch to the first stage. It may be changed afterwards, but for the bits of its masks."""
        stages = self._running()
        index, self._number = self._free.popleft(), self._number + 1
        size, arrays = stages.slots[index].write(batch, self._vocab_size)
        sent = time.perf_counter()
        self._send(stages.first, step_message(index, self._number, size), Part.BATCH)
        return _PipelineStep(self, index, self._number, size, arrays, batch.sampling.masks, sent)

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """Have all stages copy KV blocks, `pairs[i] = (from, to)`, between the steps before and those to come."""
        for message in copy_messages(COPY_BLOCKS, pairs, group):
            self._send(self._running().first, message)

    def copy_states(self, pairs: NDArray[np.int32]) -> None:
        """Likewise for recurrent state, one after the other."""
        for message in copy_messages(COPY_STATES, pairs):
            self._send(self._running().first, message)

    def hand_over(self, num_tokens: int) -> Callable[[], None] | None:
        """Nothing: no thread of this process computes."""
        return None

    def stage_stats(self) -> PipelineStats:
        """What the stages have done since the start, from any thread."""
        return PipelineStats(self._times.stats(), self._restarts.total)

    def close(self) -> None:
        """End the processes and give back the memory that they share."""
        self._is_closed = True
        self._end()

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called, on any thread, when a stage ends."""
        self._on_end = on_end
        if self._stages is not None:
            self._stages.watch(on_end)

    def check(self) -> None:
        """Raise DeviceError if a stage has ended."""
        stages = self._running()
        if stages.has_ended:
            raise DeviceError(stages.failure())

    def restart(self, failure: DeviceError) -> None:
        """Start all stages again. Raises DeviceError if too many have ended, LoadCancelledError when this is stopped.

        A start that fails counts like a stage that ends.
        """
        while True:
            self._end()
            pause_s = self._restarts.pause_s()
            if pause_s is None:
                raise DeviceError(f"{failure}. Stages have ended too often to start them again") from failure
            if pause_s:
                logger.warning("The stages start again in %g s", pause_s)
            self._cancellation.wait(pause_s)
            started = time.perf_counter()
            try:
                self._begin(self._launch(self._cancellation))
            except DeviceError as error:
                logger.error("The stages could not be started again: %s", error)
                failure = error
            else:
                logger.warning("All stages run again after %.1f s", time.perf_counter() - started)
                return

    def stop_restarting(self) -> None:
        """Let no restart begin any more, and end one that has."""
        self._cancellation.cancel()

    def end_step(
        self, slot: int, number: int, size: int, arrays: Arrays, masks: TokenMasks | None, sent: float
    ) -> StepOutput:
        """Wait for a step that was started. Raises DeviceError, naming the stage, if one has ended or failed."""
        stages = self._running()
        if masks is not None:
            masks.wait()
            bits = arrays["masks"]
            assert bits is not None
            bits[...] = masks.bits
            self._send(stages.masks, step_message(slot, number, size, MASKS), Part.MASKS)
        message, received = self._receive(stages, number, arrays)
        if message[0] == FAILED:
            raise DeviceError(read_failure(message))
        assert read_step(message)[:2] == (slot, number), "steps end in another order than they were started in"
        ended = stages.slots[slot].output(arrays).copy()
        times = arrays["times"]
        assert times is not None
        self._times.observe(times, sent, received)
        self._free.append(slot)
        return ended

    def _begin(self, stages: Stages) -> None:
        self._stages, self._free = stages, deque(range(len(stages.slots)))
        if self._on_end is not None:
            stages.watch(self._on_end)

    def _end(self) -> None:
        stages, self._stages = self._stages, None
        if stages is not None:
            stages.close()

    def _running(self) -> Stages:
        if self._stages is None:
            raise DeviceError("this executor was closed" if self._is_closed else "the stages have ended")
        return self._stages

    def _receive(self, stages: Stages, number: int, arrays: Arrays) -> tuple[bytes, float | None]:
        started = time.perf_counter()
        while True:
            try:
                message, received = stages.last.receive(_SLOW_S)
            except TimeoutError:
                seconds, index = time.perf_counter() - started, stages.where(number, arrays)
                logger.warning(
                    "A step has taken %.0f s so far: it is at %s, %s", seconds, stages.name(index), stages.place(index)
                )
                continue
            if not message:
                raise DeviceError(stages.failure())
            return message, received

    def _send(self, link: Link, message: bytes, part: Part = Part.NOTHING) -> None:
        try:
            link.send(message, part)
        except OSError as error:
            raise DeviceError(self._running().failure()) from error


class _PipelineStep:
    """A step that was started."""

    def __init__(
        self,
        executor: PipelineExecutor,
        slot: int,
        number: int,
        size: int,
        arrays: Arrays,
        masks: TokenMasks | None,
        sent: float,
    ) -> None:
        self._executor, self._step = executor, (slot, number, size, arrays, masks, sent)

    def wait(self) -> StepOutput:
        """What the step gave, once. Raises DeviceError."""
        return self._executor.end_step(*self._step)
