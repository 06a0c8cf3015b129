"""Adapters for tests: the CPU's, told to be like something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from tidewheel.engine.devices.graph.adapter import DeviceMemory
from tidewheel.engine.devices.graph.cpu import CpuAdapter
from tidewheel.engine.devices.graph.device import GraphDevice, Kind
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.devices.memory_options import MemoryOptions

GIB = 1 << 30


class TracingAdapter(CpuAdapter):
    """torch.compile without a code generator, which is most of the time that it takes."""

    def __init__(self, options: GraphOptions) -> None:
        super().__init__(options, backend="aot_eager")


class GuardedAdapter(CpuAdapter):
    """torch.compile that does nothing but look for its own earlier results, and count them."""

    def __init__(self, options: GraphOptions) -> None:
        super().__init__(options, backend="eager")


class ScriptedAdapter(CpuAdapter):
    """A device with memory of its own, half precision and graphs. It notes what it is asked for."""

    dtypes = ("bfloat16",)
    chunked_prefill = False
    max_prefill_seqs = 1
    has_float64 = False
    free: ClassVar[int] = GIB
    calls: ClassVar[list[str]] = []

    def enter(self) -> None:
        self.calls.append("enter")

    def memory(self) -> DeviceMemory:
        return DeviceMemory(self.free, 2 * GIB)

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.calls.append("compile")
        return function

    def run(self, launch: Callable[[], None]) -> None:
        self.calls.append("run")
        launch()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.calls.append("capture")

        def replay() -> None:
            self.calls.append("replay")
            launch()

        return replay


class MarkingAdapter(CpuAdapter):
    """One whose executor is given the next step before the last one is waited for."""

    def mark(self) -> Callable[[], None]:
        return lambda: None


def device(
    adapter: type[CpuAdapter], has_own_memory: bool, options: GraphOptions, memory: MemoryOptions | None = None
) -> GraphDevice:
    dtypes = adapter.dtypes
    return GraphDevice(Kind("scripted", adapter.__module__, adapter.__name__, has_own_memory, dtypes), options, memory)
