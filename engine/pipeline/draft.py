"""Drafting in the stages of a pipeline: a draft model beside the first stage, or a draft layer behind the last.

Either computes on the processors of its stage. They have nothing else to do: with drafts, one step runs at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..devices.batch import StepBatch
from ..devices.limits import ExecutorLimits, ExecutorOptions
from ..options import EngineOptions
from .links import COPY_OF_DRAFT, DRAFT, DRAFT_HEAD, copy_messages, read_draft

if TYPE_CHECKING:
    from ..devices.cpu.executor import CpuExecutor
    from .step_slot import StepSlot


class DraftPlan(Struct, frozen=True):
    """A draft model and how to load it."""

    options: EngineOptions
    executor_options: ExecutorOptions
    limits: ExecutorLimits


class DraftingPipeline(Protocol):
    """A pipeline that has something that drafts in its stages: see PipelineExecutor."""

    limits: ExecutorLimits

    def ask(self, kind: int, batch: StepBatch, counts: NDArray[np.int32], min_probability: float) -> NDArray[np.int32]:
        """Have a draft model or the layer for drafts make draft tokens. Raises DeviceError."""
        ...

    def tell(self, message: bytes) -> None:
        """Tell the first stage something. Raises DeviceError."""
        ...

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """See Executor."""
        ...


class StagedDraft:
    """A draft model beside the first stage: see DraftExecutor."""

    def __init__(self, limits: ExecutorLimits, pipeline: DraftingPipeline) -> None:
        self.limits = limits
        self._pipeline = pipeline

    def draft(self, batch: StepBatch, counts: NDArray[np.int32], min_probability: float = 0.0) -> NDArray[np.int32]:
        """See DraftExecutor. Raises DeviceError if the stage has ended or failed."""
        return self._pipeline.ask(DRAFT, batch, counts, min_probability)

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """See Executor."""
        for message in copy_messages(COPY_OF_DRAFT, pairs, group):
            self._pipeline.tell(message)


class StagedLayer:
    """The layer for drafts behind the last stage: see DraftExecutor."""

    def __init__(self, pipeline: DraftingPipeline) -> None:
        self.limits = pipeline.limits
        self._pipeline = pipeline

    def draft(self, batch: StepBatch, counts: NDArray[np.int32], min_probability: float = 0.0) -> NDArray[np.int32]:
        """See DraftExecutor. Raises DeviceError if the stage has ended or failed."""
        return self._pipeline.ask(DRAFT_HEAD, batch, counts, min_probability)

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """See Executor."""
        self._pipeline.copy_blocks(pairs, group)


def make_draft_tokens(executor: CpuExecutor, slot: StepSlot, size: int, message: bytes) -> None:
    """Write what a slot asks for into it, in the process of the stage. Raises ValueError for arrays that do not fit."""
    arrays = slot.read(size)
    counts, draft_tokens = arrays["counts"], arrays["draft_tokens"]
    assert counts is not None
    assert draft_tokens is not None
    batch = slot.batch(arrays, lambda: None)
    batch.window_tables = ()
    draft_tokens[...] = executor.draft(batch, counts, read_draft(message))
