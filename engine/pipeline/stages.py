"""Stages: the processes of a pipeline while they run, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from ..cancellation import Cancellation
from ..machine.cpu_list import cpu_list
from ..machine.memory import Memory
from ..models.spec import StageSpec
from ..weights.lora import LoraAdapter
from .links import Link
from .speed import StageCores, StageSpeed
from .stage_plan import StagePlan
from .step_slot import Arrays, StepSlot

SLOW_S: Final = 10.0
"""Seconds that stages may take for a step, draft tokens or an adapter. Then the log names the one that is waited for.
"""

_GIB = 2**30


class Stages(Protocol):
    """Processes that have loaded their weights, and links to them: to the first, from the last, and for masks to that.

    A draft model beside the first stage is asked on `first`, and answers there. `share_clock`: what `time.perf_counter`
    says in one of them can be compared with what it says in another.
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

    def where(self, number: int, arrays: Arrays) -> int:
        """The stage that a started step has reached; `number` is the step's, and `arrays` are its arrays here."""
        ...

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called, on any thread, once a process has ended that `close` has not ended."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether any process has ended, which only those know that are watched."""
        ...

    def load_adapter(self, number: int, parts: Sequence[LoraAdapter]) -> None:
        """Give each stage its part of an adapter, from any thread, also while steps run; one at a time.

        Raises DeviceError for one that they cannot run, and if a stage has ended.
        """
        ...

    def failure(self) -> str:
        """In words, which stage has ended, when one of them has."""
        ...

    def close(self) -> None:
        """End the processes, and give back what they share. Calling it twice is allowed."""
        ...


class StageHost(Protocol):
    """Machines that have the stages of a pipeline: this one if it `is_here`, or others."""

    @property
    def is_here(self) -> bool: ...

    def cores(self) -> Sequence[StageCores]:
        """The cores of each stage, in order. Raises DeviceError if they cannot be divided."""
        ...

    def measure(self, stages: Sequence[int], ceiling: str) -> Sequence[StageSpeed]:
        """Measure the cores of these stages, which have loaded nothing yet. Stages of one machine are measured in turn.

        `ceiling` names the type of the products, as `_native.measure_ceilings` does. Raises DeviceError.
        """
        ...

    def rooms(self) -> Sequence[int | None]:
        """The memory that each stage may take, in bytes; None where the machine's is all stages' alike, or unknown."""
        ...

    def memory(self, weights: Sequence[int]) -> Memory:
        """What the machines have, as if one of them had all stages. `weights` are the bytes of each stage's weights.

        Each machine's memory is scaled by its stages' share of the whole; the machine with the least decides.
        """
        ...

    def launch(self, plans: Sequence[StagePlan], weight_bytes: int) -> Launch:
        """What starts the stages there. `weight_bytes` are the whole model's."""
        ...


Launch = Callable[[Cancellation], Stages]
"""Starts the processes of a pipeline, and waits until they have loaded. Raises DeviceError and LoadCancelledError."""


def stage_name(index: int, count: int, stage: StageSpec) -> str:
    """A stage in words."""
    return f"pipeline stage {index + 1} of {count} ({stage})"


def loaded_text(
    stages: Stages, index: int, groups: Sequence[Sequence[int]], weight_bytes: int, cache_bytes: int
) -> str:
    """A loaded stage in words: where it is, on which groups of processors, and what it takes."""
    return (
        f"{stages.name(index)}: {stages.place(index)} on CPUs {'|'.join(map(cpu_list, groups))}, "
        f"{weight_bytes / _GIB:.2f} GiB of weights, {cache_bytes / _GIB:.2f} GiB of KV cache"
    )
