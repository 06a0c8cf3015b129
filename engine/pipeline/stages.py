"""Stages: the processes of a pipeline while they run, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..cancellation import Cancellation
from ..machine.cpu_list import cpu_list
from ..machine.memory import Memory
from ..models.spec import StageSpec
from .links import Link
from .runner import StagePlan
from .step_slot import StepSlot

_GIB = 2**30


class Stages(Protocol):
    """Processes that have loaded their weights, and links to them: to the first, from the last, and for masks to that.

    `share_clock`: what `time.perf_counter` says in one of them can be compared with what it says in another.
    """

    slots: Sequence[StepSlot]
    first: Link
    last: Link
    masks: Link
    share_clock: bool

    def name(self, index: int) -> str:
        """A stage in words."""
        ...

    def place(self, index: int) -> str:
        """Its process in words."""
        ...

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called, on any thread, once a process has ended that `close` has not ended."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether any process has ended, which only those know that are watched."""
        ...

    def failure(self) -> str:
        """In words, which stage has ended, when one of them has."""
        ...

    def close(self) -> None:
        """End the processes, and give back what they share. Calling it twice is allowed."""
        ...


class StageHost(Protocol):
    """Machines that have the stages of a pipeline, in place of this one."""

    def memory(self, weights: Sequence[int]) -> Memory:
        """What the machines have, as if one of them had all stages, whose `weights` take so many bytes.

        Each machine counts by the share that its stages have of the whole; the one with the least decides.
        """
        ...

    def launch(self, plans: Sequence[StagePlan]) -> Launch:
        """What starts the stages there."""
        ...


Launch = Callable[[Cancellation], Stages]
"""Starts the processes of a pipeline, and waits until they have loaded. Raises DeviceError and LoadCancelledError."""


def stage_name(index: int, count: int, stage: StageSpec) -> str:
    """A stage in words."""
    return f"pipeline stage {index + 1} of {count} ({stage})"


def loaded_text(stages: Stages, index: int, cpus: Sequence[int], weight_bytes: int, cache_bytes: int) -> str:
    """A stage that has loaded in words: where it is, and what it takes."""
    return (
        f"{stages.name(index)}: {stages.place(index)} on CPUs {cpu_list(cpus)}, "
        f"{weight_bytes / _GIB:.2f} GiB of weights, {cache_bytes / _GIB:.2f} GiB of KV cache"
    )
