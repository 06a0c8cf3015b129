"""What the device's memory that loading and a trial step leave free is used for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...machine.memory import read_memory
from ..bucketing import Bucket
from .options import CaptureStrategy, GraphOptions

_UNITS = ("B", "KiB", "MiB", "GiB")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes: what was `free` after a trial step, the `usable` part of it, and how that is shared out.

    `graphs_name` is the vendor's word for graphs, in the plural.
    """

    free: int
    usable: int
    graphs: int
    kv_cache: int
    graphs_name: str = "graphs"

    @property
    def margin(self) -> int:
        """Bytes that stay free."""
        return self.free - self.usable


def plan_memory(free: int, utilization: float, options: GraphOptions, graphs_name: str | None = "graphs") -> MemoryPlan:
    """Share out the part `utilization` of `free` bytes between graphs and the KV cache, and tell it in the log.

    A device that has no graphs (`graphs_name` None), or is to capture none, uses all that is usable for the cache.
    """
    usable = int(free * utilization)
    captures = options.captures and graphs_name is not None
    graphs = int(usable * options.graph_reserved_mem) if captures else 0
    plan = MemoryPlan(free, usable, graphs, usable - graphs, graphs_name or "graphs")
    reserved = (
        f"{in_words(graphs)} reserved for {plan.graphs_name} (VLLM_GRAPH_RESERVED_MEM={options.graph_reserved_mem:g}), "
        if captures
        else ""
    )
    logger.info(
        "Free device memory: %s, %s usable (gpu_memory_utilization=%g), %s%s reserved for KV cache",
        in_words(free),
        in_words(usable),
        utilization,
        reserved,
        in_words(plan.kv_cache),
    )
    return plan


def capture_order(buckets: Iterable[Bucket], strategy: CaptureStrategy) -> list[Bucket]:
    """The order of capturing graphs: those with least work first, or those with most sequences, then the shortest.

    A prompt's length is its tokens, a decode's the width of its table.
    """
    if strategy == "max_bs":
        return sorted(buckets, key=lambda bucket: (-bucket.batch_size, *_length(bucket)))
    return sorted(buckets, key=lambda bucket: (work(bucket), *_length(bucket), bucket.batch_size))


def work(bucket: Bucket) -> int:
    """The work of a launch: a prompt's tokens, or the blocks that a decode reads."""
    return bucket.batch_size * _length(bucket)[0]


def _length(bucket: Bucket) -> tuple[int, int]:
    return (bucket.width, 1) if bucket.query_len == 1 else (bucket.query_len, bucket.width)


class GraphBudget:
    """The memory of a phase's graphs, in bytes: what is `left`, and what the graphs have `used` so far."""

    def __init__(self, left: float) -> None:
        self.left = left
        self.used = 0.0
        self._num_tokens = 0

    def allows(self, bucket: Bucket) -> bool:
        """Whether the bucket's graph will fit, if a token takes as much memory as in the graphs before."""
        estimate = bucket.num_tokens * self.used / self._num_tokens if self._num_tokens else 0
        return estimate < self.left

    def charge(self, bucket: Bucket, num_bytes: int) -> None:
        """Book what the bucket's graph took."""
        self.left -= num_bytes
        self.used += num_bytes
        self._num_tokens += bucket.num_tokens

    def take(self, other: GraphBudget) -> None:
        """Get what is left to another."""
        self.left, other.left = self.left + other.left, 0


class MemoryUse:
    """What something takes of the device's memory and of the host's, from now until it is told.

    `measure` gives the free and the whole bytes of the device's memory when all work is done. With None, nothing is
    told.
    """

    def __init__(self, measure: Callable[[], tuple[int, int]] | None) -> None:
        self._measure = measure
        self._device = self._host = 0
        if measure is not None:
            self._device, self._host = _used(*measure()), _used(*_host_memory())

    def tell(self, what: str, took: str = "took") -> None:
        """Log it, in the words of vLLM's log on Gaudi: what `what` took until now, and what is used of all."""
        if self._measure is None:
            return
        device, host = self._measure(), _host_memory()
        logger.info(
            "%s %s %s of device memory (%s/%s used) and %s of host memory (%s/%s used)",
            what,
            took,
            in_words(_used(*device) - self._device),
            in_words(_used(*device)),
            in_words(device[1]),
            in_words(_used(*host) - self._host),
            in_words(_used(*host)),
            in_words(host[1]),
        )


def _host_memory() -> tuple[int, int]:
    memory = read_memory()
    return memory.available or 0, memory.ceiling or 0


def _used(free: int, total: int) -> int:
    return total - free


def in_words(num_bytes: float) -> str:
    """A size with four significant digits, in the largest unit that it is at least one of: 79.16 GiB, -252 KiB."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
