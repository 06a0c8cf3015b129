"""Units that load in virtual time and watch over what the host does with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from tidewheel.engine.hosting.units import Needs, Progress, Report


class Machine:
    """The memory of a machine, in bytes, which units really take."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.most_loaded = 0
        self.num_loaded = 0

    def take(self, size: int) -> None:
        self.used += size
        self.num_loaded += 1
        self.most_loaded = max(self.most_loaded, self.num_loaded)
        assert self.used <= self.total, "the machine has run out of memory"

    def free(self, size: int) -> None:
        self.used -= size
        self.num_loaded -= 1


class ScriptedLoaded:
    """A loaded unit, which counts who uses it."""

    def __init__(self, unit: ScriptedUnit) -> None:
        self.unit = unit
        self.failure: BaseException | None = None
        self.users = 0
        self.closed = False
        self.may_be_closed_in_use = False

    async def close(self) -> None:
        assert not self.closed, "closed twice"
        assert not self.users or self.may_be_closed_in_use, f"{self.unit.name} was taken away while it was used"
        self.closed = True
        await asyncio.sleep(self.unit.close_s)
        self.unit.machine.free(self.unit.size)
        self.unit.loaded = None


@dataclass
class ScriptedUnit:
    """`size` bytes, which take `load_s` seconds to load; `faults` are raised by one load after the other."""

    name: str
    machine: Machine
    size: int = 4
    pinned: bool = False
    idle_s: float | None = None
    load_s: float = 2.0
    close_s: float = 0.5
    faults: list[Exception | None] = field(default_factory=list)
    plan_faults: list[Exception | None] = field(default_factory=list)
    num_loads: int = 0
    loaded: ScriptedLoaded | None = None
    stubborn: bool = False  # finishes its load though it was cancelled

    def plan(self) -> Needs:
        if self.plan_faults and (fault := self.plan_faults.pop(0)) is not None:
            raise fault
        return Needs(self.size)

    async def load(self, report: Report) -> ScriptedLoaded:
        assert self.loaded is None, f"{self.name} was loaded twice"
        self.num_loads += 1
        self.machine.take(self.size)
        try:
            for part in range(4):
                report(Progress("reading", part / 4))
                await asyncio.sleep(self.load_s / 4)
            if self.faults and (fault := self.faults.pop(0)) is not None:
                raise fault
        except asyncio.CancelledError:
            if not self.stubborn:
                self.machine.free(self.size)
                raise
        except BaseException:
            self.machine.free(self.size)
            raise
        report(Progress("warming up", 1.0))
        self.loaded = ScriptedLoaded(self)
        return self.loaded


def units(machine: Machine, names: Iterable[str], **options: object) -> list[ScriptedUnit]:
    """Units alike."""
    return [ScriptedUnit(name, machine, **options) for name in names]  # type: ignore[arg-type]
