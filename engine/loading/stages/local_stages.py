"""LocalStages: the stages of a pipeline as processes of this machine, which share the memory of steps."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import chain
from multiprocessing.connection import Connection

from ...cancellation import Cancellation
from ...devices.base import Device
from ...errors import DeviceError
from ...machine.memory import Memory, read_memory
from ...pipeline.links import Link, LocalLink, new_link
from ...pipeline.speed import StageCores, StageSpeed, cores_at, measure
from ...pipeline.stage_plan import StagePlan
from ...pipeline.stages import SLOW_S, Launch, loaded_text
from ...pipeline.step_slot import Arrays, StepSlot
from ...weights.lora import LoraAdapter
from ..load_progress import LoadProgress
from .process import StageStart
from .processes import StageProcesses

logger = logging.getLogger(__name__)


class LocalHost:
    """See StageHost: this machine, with groups of its processors for each stage."""

    is_here: bool = True

    def __init__(self, device: Device, count: int) -> None:
        self._device, self._count = device, count

    @cached_property
    def _groups(self) -> Sequence[Sequence[Sequence[int]]]:
        return self._device.stage_groups(self._count)

    def cores(self) -> Sequence[StageCores]:
        """See StageHost."""
        return [cores_at("", sorted({*chain(*groups)})) for groups in self._groups]

    def measure(self, stages: Sequence[int], ceiling: str) -> Sequence[StageSpeed]:
        """See StageHost."""
        isa = self._device.isa or "auto"
        return [measure(isa, sorted({*chain(*self._groups[index])}), ceiling) for index in stages]

    def rooms(self) -> Sequence[int | None]:
        """See StageHost. All stages lie in the same memory, wherever the model is cut."""
        return [None] * self._count

    def memory(self, weights: Sequence[int]) -> Memory:
        """See StageHost."""
        return read_memory()

    def launch(self, plans: Sequence[StagePlan], weight_bytes: int) -> Launch:
        """See StageHost."""
        return partial(LocalStages, plans, self._groups, weight_bytes)


class LocalStages:
    """See Stages."""

    share_clock: bool = True

    def __init__(
        self,
        plans: Sequence[StagePlan],
        groups: Sequence[Sequence[Sequence[int]]],
        weight_bytes: int,
        cancellation: Cancellation,
    ) -> None:
        """Start the processes and wait until they have loaded their weights. See Launch."""
        self._plans = plans
        with ExitStack() as unfinished:
            self.slots: Sequence[StepSlot] = [plan.shape.slot() for plan in plans]
            for slot in self.slots:
                unfinished.callback(slot.close)
            links = [new_link() for _ in range(len(plans) + 1)]  # link i leads to stage i, and the last one back
            masks = new_link()
            adapters = [socket.socketpair() for _ in plans]
            ends = [end for link in (*links, masks, *adapters) for end in link]
            for end in ends:
                unfinished.callback(end.close)
            starts = [
                StageStart(
                    plan=plan,
                    groups=groups[index],
                    upstream=links[index][1].fileno(),
                    downstream=links[index + 1][0].fileno(),
                    masks=masks[1].fileno() if plan.stage.is_last else -1,
                    slots=[slot.fd for slot in self.slots],
                    adapters=adapters[index][1].fileno(),
                )
                for index, plan in enumerate(plans)
            ]
            self._processes = processes = StageProcesses(starts)
            unfinished.callback(processes.close)
            unfinished.callback(processes.stop_loading)
            kept = links[0][0], links[-1][1], masks[0], *(ours for ours, _ in adapters)
            for end in ends:  # closed here, so that the end of a process is noticed
                if end not in kept:
                    end.close()
            try:
                with (
                    cancellation.calling(processes.stop_loading),
                    LoadProgress(plans[0].options.model, weight_bytes) as progress,
                ):
                    processes.load(progress.report)
            except DeviceError:
                cancellation.check()
                raise
            self.first: Link = LocalLink(kept[0])
            self.last: Link = LocalLink(kept[1])
            self.masks: Link = LocalLink(kept[2])
            self._adapters = [Connection(ours.detach()) for ours, _ in adapters]
            unfinished.pop_all()
        for index, loaded in enumerate(processes.stages):
            logger.info("%s", loaded_text(self, index, loaded.groups, loaded.weight_bytes, loaded.cache_bytes))

    @property
    def has_ended(self) -> bool:
        """See Stages."""
        return self._processes.has_ended

    def name(self, index: int) -> str:
        """See Stages."""
        return self._processes.name(index)

    def place(self, index: int) -> str:
        """See Stages."""
        return f"process {self._processes.stages[index].process.pid}"

    def where(self, number: int, arrays: Arrays) -> int:
        """See Stages. Each stage writes into the step's arrays when it has ended there."""
        times = arrays["times"]
        assert times is not None
        return next((index for index, (*_, ended) in enumerate(times) if not ended), len(times) - 1)

    def watch(self, on_end: Callable[[], None]) -> None:
        """See Stages."""
        self._processes.watch(on_end)

    def load_adapter(self, number: int, parts: Sequence[LoraAdapter]) -> None:
        """See Stages."""
        said = []
        try:
            for connection, part in zip(self._adapters, parts, strict=True):
                connection.send((number, part))
            said = [self._answer(index) for index in range(len(self._adapters))]
        except (EOFError, OSError):
            raise DeviceError(self.failure()) from None
        if wrong := [text for text in said if text]:
            raise DeviceError(wrong[0])

    def _answer(self, index: int) -> str:
        """What is wrong with an adapter that a stage was given."""
        started = time.perf_counter()
        while not self._adapters[index].poll(SLOW_S):
            seconds = time.perf_counter() - started
            logger.warning(
                "%s, %s, has loaded an adapter for %.0f s so far", self.name(index), self.place(index), seconds
            )
        return str(self._adapters[index].recv())

    def failure(self) -> str:
        """See Stages."""
        return self._processes.failure()

    def close(self) -> None:
        """See Stages."""
        self._processes.stop_watching()
        for link in (self.first, self.last, self.masks):
            link.close()
        self._processes.close()
        for connection in self._adapters:  # now that no thread waits for an answer any more
            connection.close()
        for slot in self.slots:
            slot.close()
