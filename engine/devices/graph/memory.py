"""What the memory of a device that is left after loading and a trial step is used for."""

from __future__ import annotations

from dataclasses import dataclass

from .options import GraphOptions

_UNITS = ("B", "KiB", "MiB", "GiB")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes: what was `free` after a trial step, the `usable` part of it, and how that is shared out."""

    free: int
    usable: int
    graphs: int
    kv_cache: int


def plan_memory(free: int, options: GraphOptions) -> MemoryPlan:
    """Share out `free` bytes between graphs and the KV cache."""
    usable = int(free * options.gpu_memory_utilization)
    graphs = 0 if options.enforce_eager or options.skip_warmup else int(usable * options.graph_reserved_mem)
    return MemoryPlan(free, usable, graphs, usable - graphs)


def in_words(num_bytes: float) -> str:
    """A size with four significant digits, in the largest unit that leaves at least one of it: 79.16 GiB, -252 KiB."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
