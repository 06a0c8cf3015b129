"""`tidewheel devices`: what was detected of this machine, and what of it would be used."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import to_builtins

from tidewheel.engine.declaring.mistakes import Mistakes, made
from tidewheel.engine.declaring.option import listed, options_of
from tidewheel.engine.devices import DEVICE_NAMES
from tidewheel.engine.devices.asking import Answer, ask
from tidewheel.engine.devices.cpu.groups import choose_groups, group_list
from tidewheel.engine.devices.finding import ACCELERATORS, Finding, find
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.install_hint import install_command
from tidewheel.engine.machine.cgroup import cpu_quota
from tidewheel.engine.machine.cpu_list import cpu_list
from tidewheel.engine.machine.huge_pages import HugePages, huge_pages
from tidewheel.engine.machine.memory import Memory, read_memory
from tidewheel.engine.options import EngineOptions

from ..options.parser import OptionParser, add_option, argument_type, build, read_given
from ..options.replicas import ReplicaOptions

if TYPE_CHECKING:
    from tidewheel import _native

_GIB = 2**30
_ROOT = Path("/")
_OF_MODEL = (
    "revision", "download_dir", "dtype", "quantization", "quantization_group_size", "quantization_zero_points",
)  # fmt: skip
_IN_TORCH = {  # devices that need nothing but torch
    "torch": "the readable reference, slow",
    "graph-cpu": "the code of cuda, rocm, xpu, hpu and neuron, run by torch on this CPU; for tests",
}


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A name that `--device` takes. `detail` says why it is not available, or what is special about it.

    `found` says what there is of an accelerator, and `missing` what it lacks and how to fix that.
    """

    name: str
    available: bool
    detail: str
    found: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cores:
    """Processors by the operating system's numbers. `cpu_quota` is in cores' worth of time, None is no limit.

    `allowed` are those in this process's affinity, `physical` one of them for each physical core, and `threads`
    those that would be computed on, by group. `numa_nodes` has the allowed processors of each node.
    """

    logical: int
    allowed: list[int]
    physical: list[int]
    threads: list[list[int]]
    numa_nodes: dict[int, list[int]]
    cpu_quota: float | None


@dataclass(frozen=True, slots=True)
class DevicesReport:
    """Everything that the command shows. What only the native extension can tell is None where it cannot be loaded.

    `auto` is the device that `--device auto` means, for a model that fits into its memory. `isa_levels` has the best
    level first; `isa` is the level in use. `isa_note` says why a level stands behind one with fewer instructions.
    """

    auto: str
    devices: list[DeviceState]
    cpu_model: str
    architecture: str
    isa_levels: list[str]
    isa_note: str
    isa: str | None
    cores: Cores | None
    memory: Memory
    huge_pages: HugePages


def detect() -> DevicesReport:
    """Look at this machine. Raises DeviceError if TIDEWHEEL_ISA asks for a level that is not there."""
    try:
        from tidewheel import _native as native
    except ImportError as error:
        cpu = DeviceState("cpu", False, f"the native extension cannot be loaded: {error}")
        isa_levels, isa_note, isa, cores = [], "", None, None
    else:
        try:
            isa = native.chosen_isa_level()
        except ValueError as error:
            raise DeviceError(str(error)) from error
        cpu = DeviceState("cpu", True, "native kernels")
        isa_levels, isa_note = native.available_isa_levels(), native.isa_note()
        cores = _cores(native.topology())
    findings = [find(name) for name in ACCELERATORS]
    accelerators = [accelerator(finding) for finding in findings]
    usable = (d.name for d, finding in zip(accelerators, findings, strict=True) if d.available and finding.nodes)
    return DevicesReport(
        auto=next(usable, cpu.name),
        devices=[cpu, *accelerators, *(_in_torch(name) for name in DEVICE_NAMES if name in _IN_TORCH)],
        cpu_model=cpu_model(),
        architecture=platform.machine(),
        isa_levels=isa_levels,
        isa_note=isa_note,
        isa=isa,
        cores=cores,
        memory=read_memory(),
        huge_pages=huge_pages(),
    )


def accelerator(finding: Finding, ask: Callable[[str], Answer] = ask) -> DeviceState:
    """The state of an accelerator. Its package is asked only if nothing is missing, which takes seconds."""
    found = (*finding.nodes, *finding.facts)
    if finding.missing:
        return DeviceState(finding.name, False, "; ".join(finding.missing), found, finding.missing)
    if not finding.nodes:
        return DeviceState(finding.name, True, finding.found, found)
    try:
        answer = str(ask(finding.name))
    except DeviceError as error:
        return DeviceState(finding.name, False, f"{error}; found: {finding.found}", found, (str(error),))
    return DeviceState(finding.name, True, f"{answer}; {finding.found}", (answer, *found))


def cpu_model(root: Path = _ROOT) -> str:
    """The processor's name as it gives it, else its architecture. `root` is where `/proc` is found."""
    fields = _fields(root / "proc/cpuinfo")
    # The second is POWER's. IBM Z describes each processor in a line of its own, and ARM's kernel gives numbers only.
    names = ("model name", "cpu", "processor 0")
    return next(filter(None, map(fields.get, names)), None) or platform.processor() or platform.machine()


def render(report: DevicesReport) -> str:
    """The report for people, one fact a line."""
    lines = [("device", _device_line(device, report.auto)) for device in report.devices]
    lines += [("processor", f"{report.cpu_model} ({report.architecture})")]
    if report.isa_levels:
        levels = [f"{level} (in use)" if level == report.isa else level for level in report.isa_levels]
        note = f" ({report.isa_note})" if report.isa_note else ""
        lines.append(("ISA levels", ", ".join(levels) + note))
    if report.cores is not None:
        lines += _core_lines(report.cores)
    lines += _memory_lines(report.memory)
    lines.append(("huge pages", _huge_pages_line(report.huge_pages)))
    width = max(len(name) for name, _ in lines)
    return "".join(f"{name:{width}}  {value}\n" for name, value in lines)


def run(arguments: Sequence[str]) -> int:
    """The `devices` command. Raises TidewheelError."""
    parser = OptionParser(
        prog="tidewheel devices",
        description="Show what was detected: device, ISA levels, cores, memory.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--ray-address",
        nargs="?",
        const="auto",
        metavar="HOST:PORT",
        help="show the nodes of this Ray cluster instead [without a value, that of RAY_ADDRESS or of this machine]",
    )
    group = parser.add_argument_group("what fits on each node, with --ray-address")
    cores = next(option for option in options_of(ReplicaOptions) if option.field == "cpus_per_replica")
    group.add_argument(
        cores.flag,
        type=argument_type(cores.read),
        metavar="N",
        help="count the replicas that fit, with this many cores each [1]",
    )
    group.add_argument("--model", metavar="MODEL", help="count how many of its layers fit; nothing is loaded")
    kept = [option for option in options_of(EngineOptions) if option.field in _OF_MODEL]
    for option in kept:
        add_option(group, option)
    mistakes = Mistakes()
    parsed = parser.read(arguments, mistakes)
    model, address = parsed.get("model"), parsed.get("ray_address")
    if address is None and (asked := [name for name in (cores.name, "model") if parsed.get(name) is not None]):
        flags = listed(["--" + name.replace("_", "-") for name in asked])
        mistakes.add(f"{flags} {'needs' if len(asked) == 1 else 'need'} --ray-address")
    if model is None and (asked := [option.flag for option in kept if option.name in parsed]):
        mistakes.add(f"{listed(asked)} {'needs' if len(asked) == 1 else 'need'} --model")
    given = {} if model is None else read_given(kept, parsed, os.environ, mistakes)
    engine = mistakes.attempt(lambda: build(EngineOptions, given, model=model or "", device="cpu"))
    parser.refuse(mistakes)
    as_json: bool = parsed["json"]
    if address is not None:
        return _show_nodes(address, parsed.get(cores.name) or 1, None if model is None else made(engine), as_json)
    report = detect()
    print(json.dumps(asdict(report), indent=2) if as_json else render(report), end="\n" if as_json else "")
    return 0


def _show_nodes(address: str, cpus_per_replica: int, model: EngineOptions | None, as_json: bool) -> int:
    from tidewheel.ray.node_room import size_of
    from tidewheel.ray.nodes import nodes_of, render_nodes

    size = None if model is None else size_of(model)
    nodes = nodes_of(address, cpus_per_replica, size)
    said = json.dumps([to_builtins(node) for node in nodes], indent=2) if as_json else render_nodes(nodes, size)
    print(said.rstrip())
    return 0


def _in_torch(name: str) -> DeviceState:
    # Looked for and not imported: that takes seconds.
    if find_spec("torch") is None:
        return DeviceState(name, False, f"needs torch: {install_command('torch')}")
    return DeviceState(name, True, _IN_TORCH[name])


def _cores(topology: _native.Topology) -> Cores:
    quota = cpu_quota()
    nodes: dict[int, list[int]] = {}
    for processor in topology["processors"]:
        nodes.setdefault(processor["numa_node"], []).append(processor["cpu"])
    allowed = [processor["cpu"] for processor in topology["processors"]]
    return Cores(
        logical=os.cpu_count() or len(allowed),
        allowed=allowed,
        physical=topology["cores"],
        threads=choose_groups("auto", topology, quota),
        numa_nodes=nodes,
        cpu_quota=quota,
    )


def _device_line(device: DeviceState, auto: str) -> str:
    chosen = "; what --device auto means" if device.name == auto else ""
    return f"{device.name}: {'available' if device.available else 'not available'} ({device.detail}{chosen})"


def _core_lines(cores: Cores) -> list[tuple[str, str]]:
    nodes = "; ".join(f"node {node}: CPUs {cpu_list(cpus)}" for node, cpus in sorted(cores.numa_nodes.items()))
    groups = "" if len(cores.threads) == 1 else f" in {len(cores.threads)} groups"
    threads = f"{sum(map(len, cores.threads))}{groups}, on CPUs {group_list(cores.threads)}"
    quota = "none" if cores.cpu_quota is None else f"{cores.cpu_quota:g} cores' worth of time"
    return [
        ("cores", f"{cores.logical} logical, {len(cores.allowed)} allowed (CPUs {cpu_list(cores.allowed)}), "
         f"{len(cores.physical)} of them physical"),
        ("threads", f"{threads} (--threads-bind changes it)"),
        ("NUMA", nodes),
        ("cgroup CPU quota", quota),
    ]  # fmt: skip


def _memory_lines(memory: Memory) -> list[tuple[str, str]]:
    cgroup = "none"
    if memory.cgroup_limit is not None:
        cgroup = f"{gib(memory.cgroup_limit)}, {gib(memory.cgroup_used)} used"
    size = f"{gib(memory.total)}, {gib(memory.available)} available"
    return [("memory", size), ("cgroup memory limit", cgroup)]


def _huge_pages_line(pages: HugePages) -> str:
    size = "" if pages.size is None else f" of {pages.size // 2**20} MiB"
    return (
        f"transparent: {pages.transparent or 'not supported'}; "
        f"reserved: {pages.reserved}{size}, {pages.reserved_free} free"
    )


def gib(count: int | None) -> str:
    """An amount of memory in words."""
    return "unknown" if count is None else f"{count / _GIB:.2f} GiB"


def _fields(path: Path) -> dict[str, str]:
    """`name: value` lines; of a name that repeats, the first value."""
    fields: dict[str, str] = {}
    for line in _lines(path):
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
