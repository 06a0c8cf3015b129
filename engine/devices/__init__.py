"""Devices by name. Each is imported only when asked for: the CPU's needs neither torch nor jax."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ..declaring.option import Options
from .cpu.options import CpuOptions
from .finding import ACCELERATORS, is_there, require
from .graph.hpu_options import HpuOptions
from .graph.options import GraphOptions
from .memory_options import MemoryOptions
from .parallel_options import ParallelOptions
from .tpu.options import TpuOptions

if TYPE_CHECKING:
    from .base import Device

__all__ = [
    "DEVICE_NAMES",
    "DEVICE_OPTIONS",
    "SERVING_DEVICES",
    "check_options",
    "get_device",
    "means_cpu",
    "require",
    "stages_take_turns",
]

logger = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """Where a device is, and the groups of options that it has: it is made with each of them, or None in its place."""

    module: str
    device: str
    options: tuple[type[Options], ...] = ()


_DEVICES = {
    "cpu": _Entry(".cpu.device", "CpuDevice", (CpuOptions, ParallelOptions)),
    "cuda": _Entry(".graph.accelerators", "cuda", (GraphOptions, MemoryOptions, ParallelOptions)),
    "rocm": _Entry(".graph.accelerators", "rocm", (GraphOptions, MemoryOptions, ParallelOptions)),
    "xpu": _Entry(".graph.accelerators", "xpu", (GraphOptions, MemoryOptions)),
    "hpu": _Entry(".graph.accelerators", "HpuDevice", (GraphOptions, MemoryOptions, HpuOptions, ParallelOptions)),
    "neuron": _Entry(".graph.accelerators", "NeuronDevice", (GraphOptions, MemoryOptions, ParallelOptions)),
    "tpu": _Entry(".tpu.device", "TpuDevice", (TpuOptions, MemoryOptions, ParallelOptions)),
    "torch": _Entry(".torch_reference", "TorchDevice"),
    "graph-cpu": _Entry(".graph.device", "graph_cpu", (GraphOptions, MemoryOptions, ParallelOptions)),
}
_DEFAULT = "cpu"

DEVICE_NAMES = ("auto", *_DEVICES)
SERVING_DEVICES = tuple(name for name in _DEVICES if name != "graph-cpu")
"""The devices without the one that is only for tests."""
DEVICE_OPTIONS = tuple(dict.fromkeys(group for entry in _DEVICES.values() for group in entry.options))
"""The groups of options that not all devices have."""


def get_device(name: str, options: Iterable[Options] = (), weight_bytes: int = 0) -> Device:
    """The device that `--device name` means, one of DEVICE_NAMES. `require` says whether this machine has it.

    "auto" is the first accelerator that can be used and whose free memory holds its part of `weight_bytes`, else the
    CPU. The device gets its own groups of the options. That a group which only others have takes no effect is logged.
    """
    groups = {type(group): group for group in options}
    if name == "auto":
        parallel = groups.get(ParallelOptions)
        parts = parallel.tensor_parallel_size if isinstance(parallel, ParallelOptions) else 1
        name = _automatic(weight_bytes // parts)
    module, device, own = _DEVICES[name]
    for kind, group in groups.items():
        if kind not in own:
            owners = ", ".join(other for other, entry in _DEVICES.items() if kind in entry.options)
            if given := group.given_flags():
                logger.warning("%s: no effect on the %s device, only on %s", ", ".join(given), name, owners)
    make: Callable[..., Device] = getattr(import_module(module, __package__), device)
    return make(*(groups.get(group) for group in own))


def check_options(name: str, options: Iterable[Options], num_stages: int = 1) -> None:
    """Raise DeviceError for options that this machine cannot serve with any model.

    `num_stages` counts the stages of a pipeline on this machine. With accelerators, it is not known yet what
    `--device auto` means, so nothing is checked then.
    """
    require(name)
    if means_cpu(name):
        from .cpu.device import check_groups

        check_groups(*_of_cpu(options), num_stages)


def stages_take_turns(name: str, options: Iterable[Options], num_stages: int) -> bool:
    """Whether the stages of a pipeline need more cores than this machine has. False for devices without stages.

    Raises DeviceError for cores that cannot be had.
    """
    if not means_cpu(name):
        return False
    from .cpu.device import take_turns

    return take_turns(*_of_cpu(options), num_stages)


def _of_cpu(options: Iterable[Options]) -> tuple[CpuOptions, ParallelOptions]:
    """The CPU's groups of the options."""
    given = [*options]
    return (
        next((group for group in given if isinstance(group, CpuOptions)), CpuOptions()),
        next((group for group in given if isinstance(group, ParallelOptions)), ParallelOptions()),
    )


def means_cpu(name: str) -> bool:
    """Whether `--device name` means the CPU, whatever the model."""
    return name == "cpu" or (name == "auto" and not any(map(is_there, ACCELERATORS)))


def _automatic(weight_bytes: int) -> str:
    nearby = [name for name in ACCELERATORS if is_there(name)]
    if not nearby:
        return _DEFAULT
    from .asking import choose  # and the modules that it takes to start a process, which most machines can do without

    return choose(nearby, weight_bytes) or _DEFAULT
