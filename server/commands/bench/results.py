"""From seconds to results: rates, and what they are of the machine's ceilings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .ceilings import Ceilings, memory_ceiling
from .costs import Costs, Work
from .device_runs import KernelTimes, PhaseTimes
from .report import DecodeResult, KernelResult, PrefillResult, Profile
from .spread import Spread
from .workload import Decode, Prefill

EngineRates = dict[Decode, "list[float] | None"]


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Phase i of `ceilings` is the i-th prefill, and after these the decodes."""

    prefills: list[tuple[Prefill, PhaseTimes]]
    decodes: list[tuple[Decode, PhaseTimes]]
    ceilings: Ceilings | None


def prefill_results(times: DeviceTimes, costs: Costs, compute_ceiling: str) -> list[PrefillResult]:
    """The results of the prefills; `compute_ceiling` is the one that bounds their arithmetic."""
    results = []
    for phase, (prefill, measured) in enumerate(times.prefills):
        ceilings = _phase_ceilings(times, phase, compute_ceiling)
        rates = Spread.of([prefill.prompts * prefill.tokens / s for s in measured.seconds])
        flops = rates.median * costs.flops(0, prefill.tokens, 1) / prefill.tokens
        profile = None
        if measured.kernels is not None:
            work = costs.prefill_kernels(prefill.prompts, prefill.tokens, measured.kernels.steps)
            profile = _profile(measured.kernels, work, ceilings)
        fraction = ceilings.compute_fraction(flops)
        results.append(PrefillResult(prefill.prompts, prefill.tokens, rates, flops, fraction, profile))
    return results


def decode_results(
    times: DeviceTimes, costs: Costs, compute_ceiling: str, num_tokens: int, engine_rates: EngineRates
) -> list[DecodeResult]:
    """The results of the decodes, of `num_tokens` each, and the engine's own where there are."""
    results = []
    for phase, (decode, measured) in enumerate(times.decodes, len(times.prefills)):
        ceilings = _phase_ceilings(times, phase, compute_ceiling)
        batch_size, context = decode.batch_size, decode.context
        rates = Spread.of([batch_size * num_tokens / s for s in measured.seconds])
        runs_per_second = rates.median / (batch_size * num_tokens)
        flops = runs_per_second * batch_size * costs.flops(context, num_tokens, num_tokens)
        read = runs_per_second * costs.decode_bytes(context, num_tokens, batch_size)
        engine = engine_rates.get(decode)
        profile = None
        if measured.kernels is not None:
            profile = _profile(measured.kernels, costs.decode_kernels(context, num_tokens, batch_size), ceilings)
        results.append(
            DecodeResult(
                batch_size=batch_size,
                context=context,
                tokens_per_second=rates,
                engine_tokens_per_second=Spread.of(engine) if engine else None,
                bytes_per_second=read,
                memory_fraction=ceilings.memory_fraction(read),
                flops_per_second=flops,
                compute_fraction=ceilings.compute_fraction(flops),
                profile=profile,
            )
        )
    return results


@dataclass(frozen=True, slots=True)
class _PhaseCeilings:
    """The ceilings around one phase, None if there are none, and which of them bounds its arithmetic."""

    ceilings: dict[str, float] | None
    compute: str

    def compute_fraction(self, flops_per_second: float) -> float | None:
        return None if self.ceilings is None else flops_per_second / self.ceilings[self.compute]

    def memory_fraction(self, bytes_per_second: float) -> float | None:
        return None if self.ceilings is None else bytes_per_second / self.ceilings[memory_ceiling(self.ceilings)]


def _phase_ceilings(times: DeviceTimes, phase: int, compute_ceiling: str) -> _PhaseCeilings:
    return _PhaseCeilings(None if times.ceilings is None else times.ceilings.around(phase), compute_ceiling)


def _profile(times: KernelTimes, work: Mapping[str, Work], ceilings: _PhaseCeilings) -> Profile:
    """A phase's kernels, each beside the ceilings; a kernel that took no time has no rates."""
    kernels = []
    for name, (calls, seconds) in times.kernels.items():
        known = work.get(name) if seconds > 0 else None
        flops = None if known is None else known.flops / seconds
        read = None if known is None or known.num_bytes is None else known.num_bytes / seconds
        kernels.append(
            KernelResult(
                name=name,
                calls_per_step=calls / times.steps,
                ms_per_step=seconds / times.steps * 1e3,
                share=seconds / times.seconds,
                flops_per_second=flops,
                compute_fraction=None if flops is None else ceilings.compute_fraction(flops),
                bytes_per_second=read,
                memory_fraction=None if read is None else ceilings.memory_fraction(read),
            )
        )
    other = times.seconds - sum(seconds for _, seconds in times.kernels.values())
    return Profile(times.steps, times.seconds / times.steps * 1e3, other / times.steps * 1e3, kernels)
