"""The machine's own limits, measured again and again while a model is: on a shared machine they move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tidewheel.engine.devices.cpu.ceilings import MEMORY_READ
from tidewheel.engine.machine.memory import available_memory_bytes

from .process_memory import OwnPeak
from .spread import Spread

MEMORY_COPY = "copy_bytes_per_second"  # what is read and what is written, together

_MIB = 2**20
_MIN_MEGABYTES = 256
_MEGABYTES_PER_THREAD = 64  # several times the last-level cache that comes with a core


@dataclass(frozen=True, slots=True)
class Ceilings:
    """All measurements, in order; there is one before the first phase and one after each."""

    rounds: list[dict[str, float]]

    def around(self, phase: int) -> dict[str, float]:
        """The ceilings of the phase between measurements `phase` and `phase + 1`: the higher of the two."""
        before, after = self.rounds[phase], self.rounds[phase + 1]
        return {name: max(before[name], after[name]) for name in before}

    def spreads(self) -> dict[str, Spread]:
        """Each ceiling over all measurements."""
        return {name: Spread.of([measured[name] for measured in self.rounds]) for name in self.rounds[0]}


def memory_ceiling(measured: Iterable[str]) -> str:
    """The name of the measured ceiling that is memory's."""
    return MEMORY_READ if MEMORY_READ in measured else MEMORY_COPY


class CeilingMeter:
    """Collects what `measure` gives."""

    def __init__(self, measure: Callable[[], dict[str, float]], peak: OwnPeak) -> None:
        self._measure = measure
        self._peak = peak
        self._rounds: list[dict[str, float]] = []

    def measure(self) -> None:
        """Measure once more. What memory that takes does not count as the model's."""
        self._peak.pause()
        self._rounds.append(self._measure())
        self._peak.resume()

    def result(self) -> Ceilings:
        """What has been measured so far, at least once."""
        return Ceilings(self._rounds)


class NativeCeilings:
    """Measures the processor with the threads, and at the ISA level, that a model is computed with."""

    def __init__(self, isa: str, cpus: Sequence[int], seconds: float) -> None:
        self.isa = isa
        self.cpus = list(cpus)
        self._seconds = seconds

    def __call__(self) -> dict[str, float]:
        """The ceilings of memory and of all types, each by its name in the report."""
        from tidewheel import _native

        return _native.measure_ceilings(self.isa, self.cpus, self._seconds, self._megabytes())

    def _megabytes(self) -> int:
        wanted = max(_MIN_MEGABYTES, _MEGABYTES_PER_THREAD * len(self.cpus))
        available = available_memory_bytes()
        return wanted if available is None else max(min(wanted, available // 4 // _MIB), 1)
