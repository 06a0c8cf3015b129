"""The measurements, as data and as text. The JSON is `asdict` of Report, so these fields are its schema."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidewheel.engine.devices.cpu.ceilings import MEMORY_READ
from tidewheel.engine.loading.inspection import Shape
from tidewheel.engine.machine.cpu_list import cpu_list

from . import text
from .ceilings import MEMORY_COPY
from .costs import BYTES_COUNTED, FLOPS_COUNTED
from .padding import Padding, render_padding
from .spread import Spread
from .startup import Startup

_CEILING_UNITS = {MEMORY_READ: ("memory read", "GB/s"), MEMORY_COPY: ("memory copy", "GB/s"),
                  "bfloat16_flops": ("bfloat16", "GFLOP/s"), "float16_flops": ("float16", "GFLOP/s"),
                  "int8_ops": ("int8", "GOP/s"), "float32_flops": ("float32", "GFLOP/s")}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model's shape, as `tidewheel inspect` has it. `weight_bytes` are as the device packs them."""

    name: str
    shape: Shape
    dtype: str
    load_format: str
    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The machine and device that computed. `isa` and `cpus` are None for a device whose own library decides them.

    `threads` is None for a device that does not compute on the processor.
    """

    cpu_model: str
    device: str
    isa: str | None
    threads: int | None
    cpus: list[int] | None


@dataclass(frozen=True, slots=True)
class KernelResult:
    """A kernel in a phase's steps. `share` is its part of their time. Rates are None where no work is counted."""

    name: str
    calls_per_step: float
    ms_per_step: float
    share: float
    flops_per_second: float | None
    compute_fraction: float | None
    bytes_per_second: float | None
    memory_fraction: float | None


@dataclass(frozen=True, slots=True)
class Profile:
    """One run of a phase that was recorded. `other_ms_per_step` is in no kernel."""

    steps: int
    ms_per_step: float
    other_ms_per_step: float
    kernels: list[KernelResult]


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """`prompts` of `tokens` each. Rates are the device's, without an engine; fractions are of `compute_ceiling`."""

    prompts: int
    tokens: int
    tokens_per_second: Spread
    flops_per_second: float
    compute_fraction: float | None
    profile: Profile | None


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """`batch_size` sequences, each with `context` tokens before. Rates are the device's, but the engine's."""

    batch_size: int
    context: int
    tokens_per_second: Spread
    engine_tokens_per_second: Spread | None
    bytes_per_second: float
    memory_fraction: float | None
    flops_per_second: float
    compute_fraction: float | None
    profile: Profile | None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Resident sets in bytes: of the server when it is ready, its peak until then, and the benchmark's peak.

    Peaks count the mapped checkpoint's pages, which the system may take back. What measuring the ceilings takes does
    not count.
    """

    server_ready: int | None
    server_peak: int | None
    bench_peak: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `compute_ceiling` names the ceiling for the type of the products; `ceilings` are per second.

    Fractions divide a median by the higher of the ceilings measured before and after it. What could not be measured is
    None, and `notes` say why. `padding` is None for a device that pads nothing, and `experts_counted` for a model that
    has no experts.
    """

    version: str
    model: ModelFacts
    machine: MachineFacts
    repeats: int
    decode_tokens: int
    ceilings: dict[str, Spread] | None
    compute_ceiling: str
    prefill: list[PrefillResult]
    decode: list[DecodeResult]
    padding: Padding | None
    startup: Startup | None
    memory: MemoryUse
    flops_counted: str = FLOPS_COUNTED
    bytes_counted: str = BYTES_COUNTED
    experts_counted: str | None = None
    notes: list[str] = field(default_factory=list)


def render(report: Report) -> str:
    """The report for people. With repeats, rates are medians with least..most."""
    compute, _ = _CEILING_UNITS[report.compute_ceiling]
    prefill = [["prompts", "tokens/s", "GFLOP/s", f"of {compute}"]]
    for p in report.prefill:
        arithmetic = [f"{p.flops_per_second / 1e9:.0f}", text.share(p.compute_fraction)]
        prefill.append([f"{p.prompts} x {p.tokens}", text.spread(p.tokens_per_second), *arithmetic])
    decode = [["batch", "context", "tokens/s", "with the engine", "GB/s", "of memory", "GFLOP/s", f"of {compute}"]]
    for d in report.decode:
        engine = "-" if d.engine_tokens_per_second is None else text.spread(d.engine_tokens_per_second)
        memory = [f"{d.bytes_per_second / 1e9:.1f}", text.share(d.memory_fraction)]
        arithmetic = [f"{d.flops_per_second / 1e9:.0f}", text.share(d.compute_fraction)]
        device = text.spread(d.tokens_per_second)
        decode.append([str(d.batch_size), str(d.context), device, engine, *memory, *arithmetic])
    parts = [
        text.facts(
            [*_heading(report), *((f"{name} ceiling", rate) for name, rate in ceilings_in_words(report.ceilings))]
        ),
        "Prefill\n" + text.table(prefill),
        f"Decode, {report.decode_tokens} tokens a sequence\n" + text.table(decode),
        *_profiles(report, compute),
        *([] if report.padding is None else [render_padding(report.padding)]),
        text.facts([*_startup(report.startup), *_memory(report.memory)]),
        "".join(f"{line}\n" for line in _explained(report)),
    ]
    if report.notes:
        parts.append("".join(f"note: {note}\n" for note in report.notes))
    return "\n".join(parts)


def _profiles(report: Report, compute: str) -> list[str]:
    phases = [(f"prefill {p.prompts} x {p.tokens}", p.profile) for p in report.prefill]
    phases += [(f"decode batch {d.batch_size}, context {d.context}", d.profile) for d in report.decode]
    return [_profile(f"Kernels of {name}", profile, compute) for name, profile in phases if profile is not None]


def _profile(title: str, profile: Profile, compute: str) -> str:
    rows = [["kernel", "calls", "ms", "share", "GFLOP/s", f"of {compute}", "GB/s", "of memory"]]
    for kernel in profile.kernels:
        arithmetic = [_billions(kernel.flops_per_second), text.share(kernel.compute_fraction)]
        memory = [_billions(kernel.bytes_per_second), text.share(kernel.memory_fraction)]
        time = [text.figure(kernel.calls_per_step), text.figure(kernel.ms_per_step), text.share(kernel.share)]
        rows.append([kernel.name, *time, *arithmetic, *memory])
    other = [text.figure(profile.other_ms_per_step), text.share(profile.other_ms_per_step / profile.ms_per_step)]
    rows += [["other", "-", *other, *"----"], ["all", "-", text.figure(profile.ms_per_step), "1.00", *"----"]]
    return f"{title}, a step\n{text.table(rows)}"


def _billions(rate: float | None) -> str:
    return "-" if rate is None else text.figure(rate / 1e9)


def _heading(report: Report) -> list[tuple[str, str]]:
    model, machine, shape = report.model, report.machine, report.model.shape
    layers = ", ".join(f"{count} {kind}" for kind, count in shape.mixers.items())
    active = "" if shape.active == shape.parameters else f", {shape.active / 1e6:.1f} M of them for each token"
    state = f"; state: {text.size(shape.state_bytes)} a sequence" if shape.state_bytes else ""
    kept = f"{model.dtype}, {text.size(model.weight_bytes)}; KV: {model.kv_bytes_per_token} bytes a token{state}"
    where = "" if machine.cpus is None else f" on CPUs {cpu_list(machine.cpus)}"
    isa = "" if machine.isa is None else f", {machine.isa}"
    threads = "" if machine.threads is None else f", {machine.threads} threads"
    return [
        ("model", f"{model.name} ({shape.family}), {shape.parameters / 1e6:.1f} M parameters{active}"),
        ("layers", f"{shape.layers} ({layers}), hidden size {shape.hidden_size}, vocabulary {shape.vocab_size}"),
        *(("attention", heads) for heads in shape.heads),
        ("weights", kept),
        ("device", f"{machine.device}{isa}{threads}{where}, {machine.cpu_model}"),
    ]


def ceilings_in_words(ceilings: dict[str, Spread] | None) -> list[tuple[str, str]]:
    """What each ceiling is of, and its rate."""
    if ceilings is None:
        return []
    return [
        (what, f"{text.spread(ceilings[name], 1e9)} {unit}")
        for name, (what, unit) in _CEILING_UNITS.items()
        if name in ceilings
    ]


def _startup(startup: Startup | None) -> list[tuple[str, str]]:
    if startup is None:
        return []
    seconds = text.spread(startup.seconds)
    return [("start-up", f"{seconds} s, from the start of a `tidewheel serve` process to /health answering 200")]


def _memory(memory: MemoryUse) -> list[tuple[str, str]]:
    amounts = [
        (memory.server_ready, "the server when ready"),
        (memory.server_peak, "its peak until then"),
        (memory.bench_peak, "this benchmark's peak"),
    ]
    known = [f"{text.size(amount)} {what}" for amount, what in amounts if amount is not None]
    return [("memory resident", ", ".join(known))] if known else []


def _explained(report: Report) -> list[str]:
    spread = "" if report.repeats == 1 else f"medians of {report.repeats} repeats (least..most); "
    shares = "" if report.ceilings is None else "shares are of the higher of the ceilings measured before and after; "
    measured = f"{spread}{shares}without the engine, except where a row says so"
    experts = [] if report.experts_counted is None else [report.experts_counted]
    return [measured, report.flops_counted, report.bytes_counted, *experts]
