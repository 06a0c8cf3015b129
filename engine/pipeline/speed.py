"""How fast the cores of each stage are, measured for a moment before the layers are shared out.

Stages whose cores are of the same kind are not told apart: what else runs at a start must not move a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from tidewheel import _native

from ..devices.cpu.ceilings import MEMORY_READ
from ..machine.memory import available_memory_bytes

_ROOT = Path("/")
_MIB = 2**20
_SECONDS = 0.06
_MEGABYTES_PER_THREAD, _MAX_MEGABYTES = 128, 512  # one thread alone may have a whole last-level cache
_ALIKE = 0.9  # of the higher of two numbers
_MAX_ROUNDS = 4


class StageCores(Struct, frozen=True):
    """The machine of a stage, how many cores it has, and their highest clock, 0 if that is not known."""

    machine: str
    count: int
    megahertz: float


class StageSpeed(Struct, frozen=True):
    """What a stage's cores can do in a second: bytes that they read from memory, and operations in products."""

    read_bytes: float
    operations: float

    def __str__(self) -> str:
        return f"reads {self.read_bytes / 1e9:.1f} GB/s and computes {self.operations / 1e9:.0f} G operations/s"


def cores_at(machine: str, cpus: Sequence[int], root: Path = _ROOT) -> StageCores:
    """These processors of the machine that this process runs on. `root` is where `/sys` is."""
    clocks = [_megahertz(cpu, root) for cpu in cpus]
    return StageCores(machine, len(cpus), sum(clocks) / len(clocks))


def measure(isa: str, cpus: Sequence[int], ceiling: str) -> StageSpeed:
    """Measure processors of this machine for about 0.1 s, with products in the type that `ceiling` names."""
    wanted, available = min(_MEGABYTES_PER_THREAD * len(cpus), _MAX_MEGABYTES), available_memory_bytes()
    megabytes = wanted if available is None else max(min(wanted, available // 8 // _MIB), 1)
    found = _native.measure_ceilings(isa, cpus, _SECONDS, megabytes)
    return StageSpeed(found[MEMORY_READ], found[ceiling])


def stage_speeds(
    cores: Sequence[StageCores], measure: Callable[[Sequence[int]], Sequence[StageSpeed]]
) -> list[StageSpeed] | None:
    """The speed of each stage. `measure` measures some of them. If all are alike: None, and nothing is measured.

    Stages are alike if they have as many cores of the same machine, with the same clock. Other work makes cores slower
    and never faster. So the best of several rounds counts, and there is no further round once none of them lags.
    """
    like = [next(index for index, other in enumerate(cores) if _are_alike(own, other)) for own in cores]
    asked = sorted({*like})
    if len(asked) == 1:
        return None
    best = measure(asked)
    for _ in range(_MAX_ROUNDS - 1):
        if max(slowness(best)) == 1:
            break
        best = [
            StageSpeed(max(old.read_bytes, new.read_bytes), max(old.operations, new.operations))
            for old, new in zip(best, measure(asked), strict=True)
        ]
    found = dict(zip(asked, best, strict=True))
    return [found[index] for index in like]


def slowness(speeds: Sequence[StageSpeed]) -> list[float]:
    """How long each stage takes for the same layers, by the fastest, which is 1. Those nearly as fast are 1 too.

    Half of it is how long the weights are read, which few requests wait for, and half how long products are computed,
    which prompts and many requests wait for.
    """
    read, operations = max(s.read_bytes for s in speeds), max(s.operations for s in speeds)
    times = [read / speed.read_bytes + operations / speed.operations for speed in speeds]
    least = min(times)
    return [1.0 if least >= _ALIKE * time else time / least for time in times]


def _are_alike(one: StageCores, other: StageCores) -> bool:
    clocks = sorted((one.megahertz, other.megahertz))
    return (one.machine, one.count) == (other.machine, other.count) and clocks[0] >= _ALIKE * clocks[1]


def _megahertz(cpu: int, root: Path) -> float:
    try:
        return int((root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq").read_text()) / 1e3
    except (OSError, ValueError):
        return 0.0
