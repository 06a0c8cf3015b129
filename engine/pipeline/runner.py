"""StageRunner: the layers of a stage in the process that computes them, wherever its steps come from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from ..devices.batch import SamplingBatch, StepOutput
from ..errors import DeviceError
from .draft import make_draft_tokens
from .links import (
    COPY_BLOCKS,
    COPY_OF_DRAFT,
    COPY_STATES,
    DRAFT,
    DRAFT_HEAD,
    DROP_ADAPTER,
    FAILED,
    STEP,
    Link,
    Part,
    failed_message,
    read_copies,
    read_drop,
    read_step,
)
from .stage_plan import StagePlan
from .step_slot import StepSlot

if TYPE_CHECKING:
    from ..devices.cpu.executor import CpuExecutor


class LoadedLayers(Struct, frozen=True):
    """The layers of a stage in memory, and a draft model beside them, which is closed with them."""

    executor: CpuExecutor
    draft: CpuExecutor | None

    @property
    def weight_bytes(self) -> int:
        """What the weights take."""
        return sum(executor.native.weight_bytes for executor in self._all)

    @property
    def cache_bytes(self) -> int:
        """What the KV cache may take."""
        return sum(executor.native.cache_bytes for executor in self._all)

    @property
    def _all(self) -> list[CpuExecutor]:
        return [self.executor] if self.draft is None else [self.executor, self.draft]


class StageRunner:
    """Runs steps until no more can come. `finished` is the number of the last step that it has computed, 0 at first."""

    def __init__(
        self,
        plan: StagePlan,
        loaded: LoadedLayers,
        slots: Sequence[StepSlot],
        upstream: Link,
        downstream: Link,
        masks: Link | None,
    ) -> None:
        """Steps come from `upstream` and go `downstream`. On `masks` the last stage hears of them.

        A draft model is asked on `upstream`, and answers there.
        """
        self._index, self._stage = plan.index, plan.stage
        self._executor, self._native, self._draft = loaded.executor, loaded.executor.native, loaded.draft
        self._upstream, self._downstream, self._masks = upstream, downstream, masks
        self._slots = slots
        self._nothing = SamplingBatch.greedy([]), np.empty(0, np.int32)
        self.finished = 0
        self._step = 0  # the number of the step that runs
        self._masks_of = 0  # the last one whose masks were written
        is_last = plan.stage.is_last
        self._passed = {
            STEP: Part.OUTPUT if is_last else Part.ROWS,
            DRAFT_HEAD: Part.DRAFTED if is_last else Part.ASKED,
        }

    def run(self) -> None:
        """Return when the stage before this one, or the starter, has gone."""
        self._native.pin_caller()
        while True:
            message, arrived = self._upstream.receive()
            if not message:
                return
            try:
                said = self._take(message, arrived)
            except (DeviceError, ValueError, MemoryError) as error:
                said = failed_message(
                    f"pipeline stage {self._index + 1} ({self._stage}): {str(error) or 'out of memory'}"
                )
            try:
                if said and message[0] == DRAFT:
                    self._upstream.send(said, Part.DRAFTED if said[0] == DRAFT else Part.NOTHING)
                elif said:
                    self._downstream.send(said, self._passed.get(said[0], Part.NOTHING))
            except OSError:  # who would read it has gone
                return

    def _take(self, message: bytes, arrived: float | None) -> bytes:
        """Do what a message says; what to say of it."""
        kind = message[0]
        if kind == COPY_OF_DRAFT:
            assert self._draft is not None
            self._draft.copy_blocks(*read_copies(message))
            return b""
        if kind == DRAFT or (kind == DRAFT_HEAD and self._stage.is_last):
            slot, _, size = read_step(message)
            drafting = self._draft if kind == DRAFT else self._executor
            assert drafting is not None
            make_draft_tokens(drafting, self._slots[slot], size, message)
            return message
        if kind == DROP_ADAPTER:
            self._executor.drop_lora(read_drop(message))
        elif kind == STEP:
            self._run_step(*read_step(message), arrived)
        elif kind == COPY_BLOCKS:
            self._executor.copy_blocks(*read_copies(message))
        elif kind == COPY_STATES:
            if self._native.has_states:
                self._executor.copy_states(read_copies(message)[0])
        else:
            assert kind in (FAILED, DRAFT_HEAD)
        return message if kind in (STEP, FAILED) or not self._stage.is_last else b""

    def _run_step(self, slot_index: int, number: int, size: int, arrived: float | None) -> None:
        started = time.perf_counter()
        self._step = number
        slot = self._slots[slot_index]
        arrays = slot.read(size)
        times, rows = arrays["times"], arrays["rows"]
        assert times is not None
        times[self._index, :2] = np.nan if arrived is None else arrived, started
        batch, output = slot.batch(arrays, self._await_masks), slot.output(arrays)
        if not self._stage.is_last:
            batch.sampling, batch.logits_rows = self._nothing
            output = StepOutput(self._nothing[1])
        if not self._native.has_states:
            batch.state_slots = batch.num_draft_tokens = None
        self._executor.run_into(output, batch, rows)
        times[self._index, 2] = time.perf_counter()
        self.finished = number

    def _await_masks(self) -> None:
        assert self._masks is not None
        while self._masks_of < self._step:
            message, _ = self._masks.receive()
            if not message:
                raise DeviceError("the server has gone")
            self._masks_of = read_step(message)[1]
