"""The machine's own limits, measured again and again while a model is: on a shared machine they move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidewheel.engine.machine.memory import available_memory_bytes

from .process_memory import OwnPeak
from .spread import Spread

MEMORY = "read_bytes_per_second"
CEILING_OF = {  # by the format of the weights
    "bfloat16": "bfloat16_flops",
    "float16": "float32_flops",  # float16 weights are widened: they save memory traffic, not arithmetic
    "float32": "float32_flops",
    "int8": "int8_ops",
    "int8-channel": "int8_ops",
    "int4": "int8_ops",  # int4 weights are widened, too
}

_MIB = 2**20
_LEAST_MEGABYTES = 256
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


class CeilingMeter:
    """Measures the ceilings with the threads, and at the ISA level, that the model is computed with."""

    def __init__(self, isa: str, cpus: Sequence[int], seconds: float, peak: OwnPeak) -> None:
        self.isa = isa
        self.cpus = list(cpus)
        self._seconds = seconds
        self._peak = peak
        self._rounds: list[dict[str, float]] = []

    def measure(self) -> None:
        """Measure once more. What memory that takes does not count as the model's."""
        from tidewheel import _native

        self._peak.pause()
        self._rounds.append(_native.measure_ceilings(self.isa, self.cpus, self._seconds, self._megabytes()))
        self._peak.resume()

    def result(self) -> Ceilings:
        """What has been measured so far, at least once."""
        return Ceilings(self._rounds)

    def _megabytes(self) -> int:
        wanted = max(_LEAST_MEGABYTES, _MEGABYTES_PER_THREAD * len(self.cpus))
        available = available_memory_bytes()
        return wanted if available is None else max(min(wanted, available // 4 // _MIB), 1)
