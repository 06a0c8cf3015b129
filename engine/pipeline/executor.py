"""PipelineExecutor: a model whose layers run in several processes, one step after the other through all of them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..cancellation import Cancellation
from ..devices.batch import StepBatch, StepOutput, TokenMasks
from ..devices.executor import Executor
from ..devices.limits import ExecutorLimits
from ..errors import DeviceError
from ..weights.lora import LoraAdapter
from .draft import DraftPlan, StagedDraft
from .links import (
    COPY_BLOCKS,
    COPY_STATES,
    DRAFT,
    FAILED,
    MASKS,
    Link,
    Part,
    copy_messages,
    draft_message,
    drop_message,
    read_failure,
    read_step,
    step_message,
)
from .restarts import Restarts
from .stage_times import PipelineStats, StageTimes
from .stages import SLOW_S, Launch, Stages
from .step_slot import Arrays

logger = logging.getLogger(__name__)


class PipelineExecutor(Executor):
    """Gives steps to the first stage and takes what they gave from the last one.

    Up to a step for each stage may be started before the first of them is waited for. They are waited for in order.
    When a stage has ended, all of them are started again: see Executor.watch.
    """

    can_restart = True

    def __init__(
        self,
        limits: ExecutorLimits,
        launch: Launch,
        cancellation: Cancellation,
        draft: DraftPlan | None = None,
        *,
        split_adapter: Callable[[LoraAdapter], list[LoraAdapter]],
    ) -> None:
        """Start the stages, which a `cancellation` ends, the first of them with a `draft` model if that is planned.

        `split_adapter` gives the parts that the stages have of an adapter. Raises DeviceError and LoadCancelledError.
        """
        self.limits = limits
        self.draft = None if draft is None else StagedDraft(draft.limits, self)
        self._launch, self._cancellation = launch, Cancellation()
        self._split_adapter = split_adapter
        self._adapters: dict[int, LoraAdapter] = {}  # those that stages must have when they start again
        self._loading = threading.Condition()  # one adapter at a time, and none while stages start
        self._refused: deque[int] = deque()  # adapters that some of the stages may have nevertheless
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
        """Give the batch to the first stage. It may be changed afterwards, except the bits of its masks."""
        stages = self._running()
        while self._refused:
            self.drop_lora(self._refused.popleft())
        index, self._number = self._free.popleft(), self._number + 1
        size, arrays = stages.slots[index].write(batch)
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

    def tell(self, message: bytes) -> None:
        """Tell the first stage something. Raises DeviceError if it has ended."""
        self._send(self._running().first, message)

    def ask(self, kind: int, batch: StepBatch, counts: NDArray[np.int32], min_probability: float) -> NDArray[np.int32]:
        """Have a draft model (DRAFT) or a draft head (DRAFT_HEAD) draft, while no step runs: see
        DraftExecutor.

        Raises DeviceError if a stage has ended or failed.
        """
        stages, index = self._running(), self._free[0]
        size, arrays = stages.slots[index].write(batch, counts)
        bits, draft_tokens = arrays["masks"], arrays["draft_tokens"]
        if batch.sampling.masks is not None and bits is not None:
            bits[...] = batch.sampling.masks.bits
        self._send(stages.first, draft_message(kind, index, size, min_probability), Part.ASKED)
        link, place = (stages.first, 0) if kind == DRAFT else (stages.last, len(stages.slots) - 1)

        def say_late(seconds: float) -> None:
            logger.warning("Draft tokens of %s have taken %.0f s so far", stages.name(place), seconds)

        self._receive(stages, link, say_late)
        assert draft_tokens is not None
        return draft_tokens.copy()

    def load_lora(self, number: int, adapter: LoraAdapter) -> None:
        """Give all stages their part of an adapter: see Executor. Waits while they start again.

        Raises DeviceError if they do not all take it: then no later ones are given it either.
        """
        with self._loading:
            self._loading.wait_for(lambda: self._stages is not None or self._is_closed)
            try:
                self._running().load_adapter(number, self._split_adapter(adapter))
            except DeviceError:
                self._refused.append(number)  # for the thread that sends
                raise
            self._adapters[number] = adapter

    def drop_lora(self, number: int) -> None:
        """Have all stages free an adapter, behind the steps that were started."""
        self._adapters.pop(number, None)
        if self._stages is not None:
            with contextlib.suppress(OSError):  # where a stage has ended, they start again without it
                self._stages.first.send(drop_message(number))

    def stage_stats(self) -> PipelineStats:
        """Statistics of the stages since the start, from any thread."""
        return PipelineStats(self._times.stats(), self._restarts.total)

    def close(self) -> None:
        """End the processes and give back the memory that they share."""
        self._is_closed = True
        self._end()
        with self._loading:
            self._loading.notify_all()

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
                raise DeviceError(f"{failure}. Stages have ended too often to be restarted") from failure
            if pause_s:
                logger.warning("The stages are restarted in %g s", pause_s)
            self._cancellation.wait(pause_s)
            started = time.perf_counter()
            try:
                self._begin_again(self._launch(self._cancellation))
            except DeviceError as error:
                logger.error("The stages could not be restarted: %s", error)
                failure = error
            else:
                logger.warning("All stages are running again after %.1f s", time.perf_counter() - started)
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
        message, received = self._receive(stages, stages.last, partial(self._say_where, stages, number, arrays))
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

    def _begin_again(self, stages: Stages) -> None:
        """Begin with stages that have none of the adapters yet."""
        try:
            with self._loading:
                for number, adapter in self._adapters.items():
                    stages.load_adapter(number, self._split_adapter(adapter))
                self._begin(stages)
                self._loading.notify_all()
        except BaseException:
            stages.close()
            raise

    def _end(self) -> None:
        stages, self._stages = self._stages, None
        if stages is not None:
            stages.close()

    def _running(self) -> Stages:
        if self._stages is None:
            raise DeviceError("this executor was closed" if self._is_closed else "the stages have ended")
        return self._stages

    @staticmethod
    def _receive(stages: Stages, link: Link, say_late: Callable[[float], None]) -> tuple[bytes, float | None]:
        """What comes on a link, and when. While nothing has come, `say_late(seconds)` is called from time to time."""
        started = time.perf_counter()
        while True:
            try:
                message, received = link.receive(SLOW_S)
            except TimeoutError:
                say_late(time.perf_counter() - started)
                continue
            if not message:
                raise DeviceError(stages.failure())
            if message[0] == FAILED:
                raise DeviceError(read_failure(message))
            return message, received

    @staticmethod
    def _say_where(stages: Stages, number: int, arrays: Arrays, seconds: float) -> None:
        index = stages.where(number, arrays)
        logger.warning(
            "A step has taken %.0f s so far, and waits for %s, %s", seconds, stages.name(index), stages.place(index)
        )

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
        """The step's output; call it once. Raises DeviceError."""
        return self._executor.end_step(*self._step)
