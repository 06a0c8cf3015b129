"""What the graph executor needs of an accelerator. A kind of accelerator is one file beside this one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from ...weights.dtypes import DType
from .attention import Attend, PlanAttention
from .operations import Operations


class DeviceMemory(NamedTuple):
    """Bytes of the device's memory: what is free, and all of it."""

    free: int
    total: int


class Adapter(Protocol):
    """One accelerator, or a share of one: where tensors lie, what memory is left, how a step becomes a graph.

    `name` is what `--device` calls it, and `dtypes` are the types that it computes in. `block_size` is in tokens. With
    `chunked_prefill` a prompt may be split over steps, and at most `max_prefill_seqs` prompts share one (None: as many
    as fit). Where `captures` is false, steps are run as they are compiled. With `compiles_only_layers` a step is a call
    of each layer, and layers that differ only in their weights are compiled once; else all of it is compiled as one
    function. Where `has_float64` is false, the sampler sums in float32. `attend` is its fastest attention, which is
    `gather_attention` if nothing is better, and `plan_attention` prepares what that needs. With `any_width`, attention
    takes as long in a wide block table as in a narrow one.
    """

    name: str
    device: torch.device
    dtypes: tuple[DType, ...]
    block_size: int
    chunked_prefill: bool
    max_prefill_seqs: int | None
    captures: bool
    compiles_only_layers: bool
    has_float64: bool
    attend: Attend
    plan_attention: PlanAttention
    any_width: bool

    def enter(self) -> None:
        """Make the calling thread one that uses this device. Loading and serving run on different threads."""
        ...

    def memory(self) -> DeviceMemory:
        """What is left of the memory at this moment."""
        ...

    def synchronize(self) -> None:
        """Return when all that was asked of the device is done."""
        ...

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function for one set of shapes, as this device runs it best. It takes and gives tensors on the device."""
        ...

    def run(self, launch: Callable[[], None]) -> None:
        """Do what `launch` asks of the device, without a graph. It reads and writes only tensors that stay."""
        ...

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Record what `launch` asks of the device as a graph, and return what replays it.

        It must have been run before. It reads and writes only tensors that stay where they are.
        """
        ...


@runtime_checkable
class AsyncAdapter(Adapter, Protocol):
    """One that works on while the host prepares the next step, which may then be asked for before this one is done."""

    def mark(self) -> Callable[[], None]:
        """A function that waits for all work that the device was given until now, and for no later work."""
        ...


@runtime_checkable
class OwnOperations(Adapter, Protocol):
    """One that does some operations in its own way."""

    operations: Operations


def operations_of(adapter: Adapter) -> Operations:
    """How the device does what devices do in ways of their own."""
    return adapter.operations if isinstance(adapter, OwnOperations) else Operations()
