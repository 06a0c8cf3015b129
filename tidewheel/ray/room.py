"""Room: how many cores the nodes of a cluster have, and how many of them each stage or replica can have."""

from __future__ import annotations

from collections.abc import Sequence

from tidewheel.engine.errors import TidewheelError


def cluster_cpus() -> list[float]:
    """The cores of each node of the cluster that Ray is connected to, most first."""
    import ray

    return sorted((node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]), reverse=True)


def cpus_of_stages(count: int, nodes: Sequence[float]) -> int:
    """Cores for each of `count` stages so that all have as many: one stage a node where there are enough nodes.

    `nodes` are the cores of each, most first. At least 1, also where there is no room.
    """
    return max(int(nodes[count - 1]), 1) if len(nodes) >= count else cpus_of_replicas(count, nodes)


def cpus_of_replicas(count: int, nodes: Sequence[float]) -> int:
    """The same for replicas: as many cores as each of them can have. A node may have several replicas."""
    most = int(max(nodes, default=1))
    return next((cpus for cpus in range(most, 1, -1) if room_for(cpus, nodes) >= count), 1)


def room_for(cpus: int, nodes: Sequence[float]) -> int:
    """How many processes with `cpus` cores the nodes have room for."""
    return sum(int(node // cpus) for node in nodes)


def check_room(what: str, count: int, cpus: int, nodes: Sequence[float], flag: str) -> None:
    """Raises TidewheelError if these nodes have no room for `count` processes, and no nodes will be added.

    `what` they are in words, and `flag` is the option for their number.
    """
    if room_for(cpus, nodes) < count:
        raise TidewheelError(
            f"there is no room for {count} {what} of {cpus} cores, as Ray counts {sum(nodes):g} cores here: lower "
            f"{flag} or --cpus-per-replica, or name a cluster with RAY_ADDRESS"
        )
