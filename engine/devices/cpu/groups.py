"""Which processors the CPU device computes on: groups of them, one for each NUMA node that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ...errors import DeviceError
from ...machine.cpu_list import cpu_list

if TYPE_CHECKING:
    from tidewheel._native import Topology


def default_threads(num_cores: int, quota: float | None, reserved: int | None = None) -> int:
    """How many of the cores to compute on: all that the quota pays for but those that are `reserved`.

    None reserves one core of eight or more, for the event loop. Raises DeviceError if no core is left.

    `quota` is in CPUs' worth of time: threads beyond it would use up everyone's share early and wait out the period.
    """
    threads = num_cores if quota is None else min(num_cores, max(1, int(quota)))
    if reserved is None:
        return threads - 1 if threads >= 8 else threads
    if reserved >= num_cores:
        raise DeviceError(
            f"--reserved-cpus {reserved} leaves no core to compute on: this process may use {num_cores}, so reserve at "
            f"most {num_cores - 1}"
        )
    return min(threads, num_cores - reserved)


def choose_groups(
    threads_bind: str, topology: Topology, quota: float | None, reserved: int | None = None
) -> list[list[int]]:
    """The processors to compute on, one thread each, by group.

    `auto` takes one hardware thread of each physical core, and makes a group of each NUMA node. It takes no more than
    `quota` (in CPUs' time), and leaves `reserved` cores. `0-15` names the processors of one group, `0-15|16-31` of two.
    Raises DeviceError for processors that this process may not use.
    """
    from tidewheel import _native  # which `tidewheel devices` does without

    if threads_bind == "auto":
        return _default_groups(topology, default_threads(len(topology["cores"]), quota, reserved))
    try:
        groups = [_native.parse_cpu_list(group) for group in threads_bind.split("|")]
    except ValueError as error:
        raise DeviceError(f"--threads-bind: {error}") from error
    cpus = [cpu for group in groups for cpu in group]
    allowed = [processor["cpu"] for processor in topology["processors"]]
    if missing := [cpu for cpu in cpus if cpu not in allowed]:
        raise DeviceError(f"--threads-bind: this process may not use CPU {missing[0]}, only {cpu_list(allowed)}")
    if not all(groups) or len(set(cpus)) != len(cpus):
        raise DeviceError("--threads-bind must name a CPU in each group, and each CPU once, like 0-15 or 0-15|16-31")
    return groups


def shared_out(
    groups: Sequence[Sequence[int]], num_groups: int, *, named: bool, asked_by: str = "--tensor-parallel-size"
) -> list[list[int]]:
    """The same processors in `num_groups` groups of neighbours, as the option `asked_by` asks.

    Groups that were `named` stay as they are. Raises DeviceError if their number is another, or for too few processors.
    """
    if len(groups) == num_groups:
        return [list(group) for group in groups]
    if named and len(groups) > 1:
        raise DeviceError(
            f"{asked_by} {num_groups} and --threads-bind {group_list(groups)} name different numbers of "
            "groups: leave one of them out"
        )
    cpus = [cpu for group in groups for cpu in group]
    if len(cpus) < num_groups:
        raise DeviceError(
            f"{asked_by} {num_groups} needs as many cores to make groups of, and there are {len(cpus)}: take at most "
            f"{len(cpus)}, or leave it out"
        )
    ends = [len(cpus) * i // num_groups for i in range(num_groups + 1)]
    return [cpus[begin:end] for begin, end in pairwise(ends)]


def groups_of_stages(
    groups: Sequence[Sequence[int]], num_stages: int, num_groups: int, *, named: bool
) -> list[list[list[int]]]:
    """The same processors for each stage of a pipeline, in `num_groups` groups.

    Groups that were `named` are all stages' groups, one stage after the other, or each is a whole stage's. Raises
    DeviceError if they are neither, or for too few processors.
    """
    in_all, cpus = num_stages * num_groups, [cpu for group in groups for cpu in group]
    if len(groups) == in_all:
        return [[list(group) for group in groups[at : at + num_groups]] for at in range(0, in_all, num_groups)]
    if named and len(groups) not in (1, num_stages):
        each = "" if num_groups == 1 else f", or {in_all}: {num_groups} for each stage, one stage after the other"
        raise DeviceError(
            f"--threads-bind {group_list(groups)} names {len(groups)} groups of cores: name {num_stages}, one for each "
            f"stage of --pipeline-parallel-size{each}"
        )
    if len(cpus) < in_all:
        of_groups = "" if num_groups == 1 else f" and --tensor-parallel-size {num_groups}"
        raise DeviceError(
            f"--pipeline-parallel-size {num_stages}{of_groups} need {in_all} cores, and there are {len(cpus)}: lower "
            "them, or name more cores with --threads-bind"
        )
    stages = shared_out(groups, num_stages, named=named, asked_by="--pipeline-parallel-size")
    if small := [stage for stage in stages if len(stage) < num_groups]:
        raise DeviceError(
            f"--tensor-parallel-size {num_groups} needs as many cores in each stage of the pipeline, and one has "
            f"only the CPUs {cpu_list(small[0])}: name more cores with --threads-bind"
        )
    return [shared_out([stage], num_groups, named=False) for stage in stages]


def groups_in_turn(cpus: Sequence[int], num_stages: int, num_groups: int) -> list[list[list[int]]]:
    """Groups of one processor each for all stages of a pipeline, which take turns on too few of them.

    Raises DeviceError if there are fewer than `num_groups`: a stage has none of them twice.
    """
    shared_out([cpus], num_groups, named=False)
    places = range(num_groups)
    return [[[cpus[(stage * num_groups + i) % len(cpus)]] for i in places] for stage in range(num_stages)]


def groups_by_node(cpus: Sequence[int], num_groups: int, topology: Topology) -> list[list[int]]:
    """These processors in `num_groups` groups, of neighbours in the same NUMA node where they can be.

    Raises DeviceError for too few processors.
    """
    if num_groups == 1:
        return [list(cpus)]
    places = {processor["cpu"]: processor["numa_node"] for processor in topology["processors"]}
    nodes: dict[int, list[int]] = {}
    for cpu in sorted(cpus):
        nodes.setdefault(places.get(cpu, 0), []).append(cpu)
    return shared_out([nodes[node] for node in sorted(nodes)], num_groups, named=False)


def spanning_groups(groups: Sequence[Sequence[int]], topology: Topology) -> list[Sequence[int]]:
    """The groups with processors of more than one NUMA node."""
    nodes = {processor["cpu"]: processor["numa_node"] for processor in topology["processors"]}
    return [group for group in groups if len({nodes[cpu] for cpu in group}) > 1]


def group_list(groups: Sequence[Sequence[int]]) -> str:
    """`[[0, 1], [2, 3]]` as `0-1|2-3`, the way that `--threads-bind` takes it."""
    return "|".join(map(cpu_list, groups))


def _default_groups(topology: Topology, threads: int) -> list[list[int]]:
    """`threads` cores of as few NUMA nodes as have them: the largest nodes, and about as many cores of each."""
    cores = set(topology["cores"])
    nodes: dict[int, list[int]] = {}
    for processor in topology["processors"]:
        if processor["cpu"] in cores:
            nodes.setdefault(processor["numa_node"], []).append(processor["cpu"])
    by_size = sorted(sorted(nodes), key=lambda node: -len(nodes[node]))
    used: list[int] = []
    while sum(len(nodes[node]) for node in used) < threads:
        used.append(by_size[len(used)])
    groups = [nodes[node] for node in sorted(used)]
    while sum(map(len, groups)) > threads:
        max(reversed(groups), key=len).pop()
    return groups
