"""`tidewheel bench --kernels`: products of matrices, and attention, each by itself beside the machine's ceilings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tidewheel import __version__
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.loading.inspection import Shape

from . import text
from .costs import BYTES_COUNTED, FLOPS_COUNTED
from .measure import Say, measure
from .report import MachineFacts, Profile, Report, ceilings_in_words
from .spread import Spread
from .workload import Workload

_FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int8-channel": {"quantization": "int8-channel"},
    "int4": {"quantization": "int4"},
    "int4-fast": {"quantization": "int4-fast"},
}
# A Llama of 1B parameters, with as few of its layers as no cache has room for.
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 16384,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_SKIPPED = frozenset({"startup", "engine"})
_FLOATS = ("bfloat16_flops", "float32_flops")
_IN_FLOATS = ("attention", "recurrence")  # whatever the weights are


@dataclass(frozen=True, slots=True)
class KernelRate:
    """One kernel in one phase: milliseconds a step, and what it does in a second.

    Fractions are of the ceilings of arithmetic and of memory; None where nothing is counted.
    """

    phase: str
    kernel: str
    ms_per_step: float
    ops_per_second: float
    compute_fraction: float | None
    bytes_per_second: float | None
    memory_fraction: float | None

    @property
    def nearest(self) -> str:
        """The share of the ceiling that is nearer, and which of the two that is."""
        fractions = [(self.compute_fraction, "a"), (self.memory_fraction, "m")]
        known = [(fraction, which) for fraction, which in fractions if fraction is not None]
        if not known:
            return "-"
        fraction, which = max(known)
        return f"{text.share(fraction)}{which}"


@dataclass(frozen=True, slots=True)
class KernelRun:
    """All kernels with weights of one format, on one machine; `ceilings` are per second."""

    weights: str
    machine: MachineFacts
    ceilings: dict[str, Spread] | None
    compute_ceiling: str
    rates: list[KernelRate]


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Its JSON is `asdict` of it, so these fields are its schema."""

    version: str
    shape: Shape
    repeats: int
    runs: list[KernelRun]
    ops_counted: str = FLOPS_COUNTED
    bytes_counted: str = BYTES_COUNTED


def measure_kernels(given: Mapping[str, Any], workload: Workload, say: Say) -> KernelReport:
    """Measure the kernels of a model. Without a model, measure those of a built-in shape in each format.

    With all threads and with one, unless `given` names them. Raises TidewheelError as `measure` does.
    """
    if given.get("device", "cpu") not in ("auto", "cpu"):
        raise TidewheelError("--kernels measures the kernels of the cpu device: drop --device, or use --profile")
    workload = replace(workload, profile=True)
    reports: list[Report] = []
    with TemporaryDirectory() as folder:
        for options in _variants({**given, "device": "cpu"}, Path(folder)):
            say(_named(options))
            reports.append(measure(options, workload, _SKIPPED, lambda what: None))
            cpus = reports[-1].machine.cpus or []
            if "threads_bind" not in given and len(cpus) > 1:
                say(f"{_named(options)}, one thread")
                reports.append(
                    measure({**options, "threads_bind": str(cpus[0])}, workload, _SKIPPED, lambda what: None)
                )
    runs = [KernelRun(r.model.dtype, r.machine, r.ceilings, r.compute_ceiling, _rates(r)) for r in reports]
    return KernelReport(__version__, reports[0].model.shape, workload.repeats, runs)


def render_kernels(report: KernelReport) -> str:
    """A table for each run: phases down, kernels across."""
    shape = report.shape
    parts = [
        text.facts(
            [("shape", f"{shape.layers} layers, hidden size {shape.hidden_size}, vocabulary {shape.vocab_size}")]
            + [("attention", heads) for heads in shape.heads]
            + [("processor", report.runs[0].machine.cpu_model)]
        )
    ]
    for run in report.runs:
        machine = run.machine
        kernels = list(dict.fromkeys(rate.kernel for rate in run.rates))
        rows = [["", *kernels]]
        for phase in dict.fromkeys(rate.phase for rate in run.rates):
            cells = {
                rate.kernel: f"{text.figure(rate.ops_per_second / 1e9)} ({rate.nearest})"
                for rate in run.rates
                if rate.phase == phase
            }
            rows.append([phase, *(cells.get(kernel, "-") for kernel in kernels)])
        threads = "1 thread" if machine.threads == 1 else f"{machine.threads} threads"
        limits = "".join(f"; {name} {value}" for name, value in ceilings_in_words(run.ceilings))
        parts.append(f"{run.weights}, {machine.isa}, {threads}{limits}\n{text.table(rows)}")
    parts.append(
        "10^9 operations a second; in brackets the share of the nearer ceiling, of arithmetic (a) or of memory (m). "
        "For attention's arithmetic it is the higher of bfloat16's and float32's\n"
        f"{report.ops_counted}\n{report.bytes_counted}\n"
    )
    return "\n".join(parts)


def _variants(given: Mapping[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """The options of each run with all threads."""
    if "model" in given:
        yield dict(given)
        return
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    base = {**given, "model": str(folder), "load_format": "dummy"}
    if "quantization" in given or "dtype" in given:
        yield base
        return
    for options in _FORMATS.values():
        yield {**base, **options}


def _named(options: Mapping[str, Any]) -> str:
    """What is measured, to show while one waits."""
    return f"kernels of {options.get('quantization') or options.get('dtype') or options['model']}"


def _rates(report: Report) -> list[KernelRate]:
    floats = None if report.ceilings is None else max(report.ceilings[name].median for name in _FLOATS)
    phases: list[tuple[str, Profile | None]] = [
        (f"prefill {p.prompts} x {p.tokens}", p.profile) for p in report.prefill
    ]
    phases += [(f"decode {d.batch_size} after {d.context}", d.profile) for d in report.decode]
    return [
        KernelRate(
            phase,
            kernel.name,
            kernel.ms_per_step,
            kernel.flops_per_second,
            kernel.flops_per_second / floats if floats and kernel.name in _IN_FLOATS else kernel.compute_fraction,
            kernel.bytes_per_second,
            kernel.memory_fraction,
        )
        for phase, profile in phases
        if profile is not None
        for kernel in profile.kernels
        if kernel.flops_per_second
    ]
