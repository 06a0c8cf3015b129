"""Which processors the CPU device computes on: groups of them, one for each NUMA node that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidewheel.engine.errors import DeviceError

if TYPE_CHECKING:
    from tidewheel._native import Topology


def choose_groups(threads_bind: str, topology: Topology) -> list[list[int]]:
    """The processors to compute on, one thread each, by group.

    `auto` takes one hardware thread a physical core, within affinity and cgroup quota, and makes a group of each NUMA
    node. `0-15` names the processors of one group, `0-15|16-31` of several. Raises DeviceError for what this process
    may not use.
    """
    from tidewheel import _native  # which `tidewheel devices` does without

    if threads_bind == "auto":
        return topology["default_groups"]
    try:
        groups = [_native.parse_cpu_list(group) for group in threads_bind.split("|")]
    except ValueError as error:
        raise DeviceError(f"--threads-bind: {error}") from error
    cpus = [cpu for group in groups for cpu in group]
    allowed = [processor["cpu"] for processor in topology["processors"]]
    if missing := [cpu for cpu in cpus if cpu not in allowed]:
        raise DeviceError(f"--threads-bind: CPU {missing[0]} is not one this process may use: {cpu_list(allowed)}")
    if not all(groups) or len(set(cpus)) != len(cpus):
        raise DeviceError("--threads-bind must name a CPU in each group, and each CPU once, like 0-15 or 0-15|16-31")
    return groups


def spanning_groups(groups: Sequence[Sequence[int]], topology: Topology) -> list[Sequence[int]]:
    """Those with processors of more than one NUMA node."""
    nodes = {processor["cpu"]: processor["numa_node"] for processor in topology["processors"]}
    return [group for group in groups if len({nodes[cpu] for cpu in group}) > 1]


def group_list(groups: Sequence[Sequence[int]]) -> str:
    """`[[0, 1], [2, 3]]` as `0-1|2-3`, the way that `--threads-bind` takes it."""
    return "|".join(map(cpu_list, groups))


def cpu_list(cpus: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2,5`."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
