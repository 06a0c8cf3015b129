"""Units that load in virtual time and watch over what the host does with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tidewheel.engine.hosting.units import Needs, Progress, Report

Fault = Callable[[], Exception]


class Machine:
    """The memory of a machine, in bytes, which units really take; and what went `wrong`, for hosts survive errors."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.most_loaded = 0
        self.num_loaded = 0
        self.wrong: list[str] = []

    def check(self, right: bool, message: str) -> None:
        if not right:
            self.wrong.append(message)

    def take(self, size: int) -> None:
        self.used += size
        self.num_loaded += 1
        self.most_loaded = max(self.most_loaded, self.num_loaded)
        self.check(self.used <= self.total, "the machine has run out of memory")

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
        self.is_writing = False

    @contextmanager
    def use(self) -> Iterator[None]:
        """A request runs."""
        self.unit.machine.check(not self.closed, f"{self.unit.name} was lent after its end")
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1

    async def close(self) -> None:
        unit = self.unit
        unit.machine.check(not self.closed, f"{unit.name} was closed twice")
        unit.machine.check(not self.users or unit.may_go, f"{unit.name} was taken away while it was used")
        unit.machine.check(not unit.pinned or unit.may_go or self.failure is not None, f"{unit.name} was pinned")
        self.closed = True
        await asyncio.sleep(unit.close_s)
        unit.machine.free(unit.size)
        unit.loaded = None
        if unit.close_fails:
            raise OSError("no more file handles")


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
    faults: list[Fault | None] = field(default_factory=list)
    plan_faults: list[Fault | None] = field(default_factory=list)
    num_loads: int = 0
    num_forgotten: int = 0
    reports: list[Report] = field(default_factory=list)  # of all loads
    loaded: ScriptedLoaded | None = None
    stubborn: bool = False  # finishes its load though it was cancelled
    close_fails: bool = False
    may_go: bool = False  # whatever uses it

    def plan(self) -> Needs:
        if self.plan_faults and (fault := self.plan_faults.pop(0)) is not None:
            raise fault()
        return Needs(self.size)

    async def load(self, report: Report) -> ScriptedLoaded:
        self.machine.check(self.loaded is None, f"{self.name} was loaded twice")
        self.num_loads += 1
        self.reports.append(report)
        self.machine.take(self.size)
        try:
            for part in range(4):
                report(Progress("reading", part / 4))
                await asyncio.sleep(self.load_s / 4)
            self._fail()
        except asyncio.CancelledError:
            self.machine.free(self.size)
            if not self.stubborn:
                raise
            self._fail()
            self.machine.take(self.size)
        except BaseException:
            self.machine.free(self.size)
            raise
        report(Progress("warming up", 1.0))
        self.loaded = ScriptedLoaded(self)
        return self.loaded

    def forget(self) -> None:
        self.machine.check(self.loaded is None, f"{self.name} was forgotten while it was loaded")
        self.num_forgotten += 1

    def _fail(self) -> None:
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault()


def units(machine: Machine, names: Iterable[str], **options: object) -> list[ScriptedUnit]:
    """Units alike."""
    return [ScriptedUnit(name, machine, **options) for name in names]  # type: ignore[arg-type]
