"""`tidewheel devices --ray-address`: the nodes of a Ray cluster, and what each of them would compute with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from tidewheel import __version__
from tidewheel.engine.errors import TidewheelError
from tidewheel.server.commands.devices import detect, gib

from .cluster import joined
from .node_room import ModelSize, Takes, render_size, takes

_ANSWER_S = 90.0  # for all nodes: a process has to start there, and a vendor's package may be asked


class Findings(Struct, frozen=True):
    """A node's hardware. `auto` is what `--device auto` means there; amounts of memory are in bytes.

    `isa` is None where the native extension cannot be loaded.
    """

    version: str
    processor: str
    isa: str | None
    auto: str
    memory: int | None
    available: int | None


class Node(Struct, frozen=True):
    """A node, with the cores that Ray gives away there. `error` says why nothing was found.

    `takes` is what it would have room for, if nothing else were computed there.
    """

    address: str
    cpus: float
    findings: Findings | None
    error: str = ""
    takes: Takes | None = None


def find_here() -> Findings | str:
    """The hardware of this machine, or why it is not known."""
    try:
        found = detect()
    except TidewheelError as error:
        return str(error)
    auto = next(device for device in found.devices if device.name == found.auto)
    name = auto.name if auto.available else f"none ({auto.detail})"
    memory = found.memory
    model = f"{found.cpu_model} ({found.architecture})"
    return Findings(__version__, model, found.isa, name, memory.ceiling, memory.available)


def nodes_of(address: str, cpus_per_replica: int = 1, size: ModelSize | None = None) -> list[Node]:
    """The nodes of a cluster that are alive, and what a task on each finds there. Raises TidewheelError.

    What they would take are replicas with `cpus_per_replica` cores, and layers of a model of this size.
    """
    with joined(address):
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        found: dict[Any, Node] = {}
        for node in ray.nodes():
            if node["Alive"]:
                place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                task = ray.remote(find_here).options(num_cpus=0, max_retries=0, scheduling_strategy=place).remote()
                found[task] = Node(node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0), None)
        ended, _ = ray.wait([*found], num_returns=len(found), timeout=_ANSWER_S)
        for task, node in found.items():
            said: Findings | str = f"it has not answered within {_ANSWER_S:g} s"
            if task in ended:
                try:
                    said = ray.get(task)
                except (RayError, ImportError) as error:
                    said = _reason(error)
            known: dict[str, Any] = {"error": said}
            if isinstance(said, Findings):
                known = {"findings": said, "takes": takes(node.cpus, said.available, cpus_per_replica, size)}
            found[task] = msgspec.structs.replace(node, **known)
    return sorted(found.values(), key=lambda node: node.address)


def render_nodes(nodes: Sequence[Node], size: ModelSize | None = None) -> str:
    """The nodes for people, one a line, and what keeps them from working together."""
    head = ["node", "CPUs for Ray", "memory", "available", "ISA level", "auto", "Tidewheel", "replicas"]
    head += ["processor"] if size is None else ["layers", "processor"]
    rows = [head, *(_row(node, size) for node in nodes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    levels = {node.findings.isa for node in nodes if node.findings is not None}
    if len(levels) > 1:
        lines.append("Stages of one pipeline need the same ISA level: set TIDEWHEEL_ISA to the lowest of them.")
    if len({node.findings.version for node in nodes if node.findings is not None}) > 1:
        lines.append("All nodes need the same version of Tidewheel.")
    if size is not None:
        lines.append(render_size(size, [node.takes for node in nodes if node.takes is not None]))
    return "".join(f"{line}\n" for line in lines)


def _row(node: Node, size: ModelSize | None) -> list[str]:
    found, cells = node.findings, [node.address, f"{node.cpus:g}"]
    if found is None:
        return [*cells, *["-"] * (6 if size is None else 7), node.error]
    cells += [gib(found.memory), gib(found.available), found.isa or "-", found.auto, found.version]
    room = node.takes
    cells.append("-" if room is None else str(room.replicas))
    if size is not None:
        cells.append("-" if room is None or room.layers is None else f"{room.layers} of {size.num_layers}")
    return [*cells, found.processor]


def _reason(error: Exception) -> str:
    """The last line of what a task ended with: before it come Ray's own words and the stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"Tidewheel cannot be asked there: {lines[-1] if lines else type(error).__name__}"
