"""The run as a whole: start-up, then the device alone, then the engine, with the ceilings in between."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import uvloop

from tidewheel import __version__
from tidewheel.engine.engine import Engine
from tidewheel.engine.errors import ModelError, TidewheelError
from tidewheel.engine.text import Tokenizer
from tidewheel.server.bench.ceilings import CEILING_OF, MEMORY, CeilingMeter, Ceilings
from tidewheel.server.bench.costs import Costs
from tidewheel.server.bench.device_runs import DeviceRuns
from tidewheel.server.bench.engine_runs import decode_rates
from tidewheel.server.bench.model import LoadedModel, Plan, load, plan
from tidewheel.server.bench.process_memory import OwnPeak
from tidewheel.server.bench.report import DecodeResult, MachineFacts, MemoryUse, ModelFacts, PrefillResult, Report
from tidewheel.server.bench.spread import Spread
from tidewheel.server.bench.startup import measure_startup
from tidewheel.server.bench.workload import Prefill, Workload
from tidewheel.server.devices_report import cpu_model
from tidewheel.server.options import ModelOptions

Say = Callable[[str], None]
EngineRates = dict[tuple[int, int], "list[float] | None"]

_CACHED_FRACTION = 1.2  # of the memory ceiling, which is itself measured no better than this
_NO_STEP_LIMIT_MS = 1e9  # nothing else is running that a long prompt could hold up


@dataclass(frozen=True, slots=True)
class _DeviceTimes:
    """Seconds of each repeat. Phase i of `ceilings` is the i-th prefill, and after these the decodes."""

    prefills: list[tuple[Prefill, list[float]]]
    decodes: list[tuple[int, int, list[float]]]  # batch size, context, seconds
    ceilings: Ceilings | None


def measure(options: ModelOptions, workload: Workload, skip: frozenset[str], say: Say) -> Report:
    """Measure a model, all but the parts to `skip` (engine, startup); `say` is told what is going on.

    Raises TidewheelError if the model cannot be loaded or the workload does not fit.
    """
    planned = plan(options, workload)
    peak = OwnPeak()
    meter = _meter(options, workload.ceilings_s, peak)
    notes: list[str] = []
    if meter is None:
        notes.append("the ceilings were not measured: that takes the native extension, which is not installed")
    startup = None
    if "startup" not in skip:
        say("start-up")
        try:
            startup = measure_startup(serve_arguments(options), workload.repeats)
        except TidewheelError as error:
            notes.append(f"start-up was not measured: {error}")
    say("loading the model")
    loaded = load(planned, options, workload)
    # One thread for all the device's steps, and not this one: it is pinned to a core, and works as one of the team.
    # It lives on while the engine runs, so that the engine's thread is sure to count as another one.
    with ThreadPoolExecutor(1, thread_name_prefix="tidewheel-bench") as steps:
        try:
            times = steps.submit(_device_phases, planned, loaded, workload, meter, options.seed, say).result()
            engine_rates: EngineRates = {}
            if "engine" not in skip:
                say("decode through the engine")
                try:
                    engine_rates = _through_engine(planned, loaded, workload, options)
                except TidewheelError as error:
                    notes.append(f"the engine was not measured: {error}")
        finally:
            loaded.executor.close()
    costs = Costs(planned.spec, weight_bytes=loaded.weight_bytes, kv_bytes_per_token=planned.kv_bytes_per_token)
    compute_ceiling = CEILING_OF[planned.compute_dtype]
    decode = _decode_results(times, costs, compute_ceiling, workload.decode_tokens, engine_rates)
    if any((result.memory_fraction or 0.0) > _CACHED_FRACTION for result in decode):
        notes.append("more was read than memory can give: the model, or much of it, comes from the caches")
    return Report(
        version=__version__,
        model=_model(planned, loaded, costs, options.load_format),
        machine=_machine(planned, loaded, meter),
        repeats=workload.repeats,
        decode_tokens=workload.decode_tokens,
        ceilings=None if times.ceilings is None else times.ceilings.spreads(),
        compute_ceiling=compute_ceiling,
        prefill=_prefill_results(times, costs, compute_ceiling),
        decode=decode,
        startup=startup,
        memory=MemoryUse(
            server_ready=None if startup is None else startup.resident_bytes,
            server_peak=None if startup is None else startup.peak_bytes,
            bench_peak=peak.bytes,
        ),
        notes=notes,
    )


def serve_arguments(options: ModelOptions) -> list[str]:
    """The arguments of a `tidewheel serve` with the same model options."""
    arguments = [] if options.model is None else [options.model]
    for spec in fields(ModelOptions):
        value = getattr(options, spec.name)
        if spec.name == "model" or value == spec.default:
            continue
        flag = spec.name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments


def _meter(options: ModelOptions, seconds: float, peak: OwnPeak) -> CeilingMeter | None:
    try:
        from tidewheel.engine.devices.cpu import CpuDevice, choose_cpus
    except ImportError:
        return None
    return CeilingMeter(CpuDevice().isa, choose_cpus(options.threads_bind), seconds, peak)


def _model(planned: Plan, loaded: LoadedModel, costs: Costs, load_format: str) -> ModelFacts:
    spec, first = planned.spec, planned.spec.layers[0]
    return ModelFacts(
        name=planned.name,
        family=spec.family,
        parameters=costs.parameters,
        num_layers=len(spec.layers),
        hidden_size=spec.hidden_size,
        num_heads=first.attention.num_heads,
        num_kv_heads=first.attention.num_kv_heads,
        head_dim=first.attention.head_dim,
        intermediate_size=first.mlp.intermediate_size,
        vocab_size=spec.vocab_size,
        dtype=planned.dtype,
        load_format=load_format,
        weight_bytes=loaded.weight_bytes,
        kv_bytes_per_token=planned.kv_bytes_per_token,
    )


def _machine(planned: Plan, loaded: LoadedModel, meter: CeilingMeter | None) -> MachineFacts:
    native = meter if planned.device.name == "cpu" else None
    return MachineFacts(
        cpu_model=cpu_model(),
        device=planned.device.name,
        isa=None if native is None else native.isa,
        threads=loaded.num_threads,
        cpus=None if native is None else native.cpus,
    )


def _device_phases(
    planned: Plan, loaded: LoadedModel, workload: Workload, meter: CeilingMeter | None, seed: int, say: Say
) -> _DeviceTimes:
    runs = DeviceRuns(loaded.executor, planned.spec.vocab_size, seed)

    def ceilings() -> None:
        if meter is not None:
            meter.measure()

    ceilings()
    prefills: list[tuple[Prefill, list[float]]] = []
    for prefill in workload.prefills:
        say(f"prefill {prefill}")
        prefills.append((prefill, runs.prefill(prefill, workload.repeats)))
        ceilings()
    decodes: list[tuple[int, int, list[float]]] = []
    for context in workload.contexts:
        for batch_size in workload.batch_sizes:
            say(f"decode batch {batch_size}, context {context}")
            seconds = runs.decode(batch_size, context, workload.decode_tokens, workload.repeats)
            decodes.append((batch_size, context, seconds))
            ceilings()
    return _DeviceTimes(prefills, decodes, None if meter is None else meter.result())


def _through_engine(planned: Plan, loaded: LoadedModel, workload: Workload, options: ModelOptions) -> EngineRates:
    try:
        tokenizer = Tokenizer.load(planned.tokenizer_folder)
    except ModelError as error:
        raise TidewheelError(f"it needs a tokenizer, but {error}") from error
    engine = Engine(
        loaded.executor,
        tokenizer,
        model_name=planned.name,
        max_model_len=planned.max_model_len,
        vocab_size=planned.spec.vocab_size,
        max_step_ms=_NO_STEP_LIMIT_MS,
        enable_prefix_caching=options.enable_prefix_caching,
    )
    return uvloop.run(decode_rates(engine, workload, planned.spec.vocab_size, options.seed))


def _prefill_results(times: _DeviceTimes, costs: Costs, compute_ceiling: str) -> list[PrefillResult]:
    results = []
    for phase, (prefill, seconds) in enumerate(times.prefills):
        rates = Spread.of([prefill.prompts * prefill.tokens / s for s in seconds])
        per_token = costs.flops(0, prefill.tokens, 1) / prefill.tokens
        flops = rates.median * per_token
        share = _share(flops, times.ceilings, phase, compute_ceiling)
        results.append(PrefillResult(prefill.prompts, prefill.tokens, rates, flops, share))
    return results


def _decode_results(
    times: _DeviceTimes, costs: Costs, compute_ceiling: str, num_tokens: int, engine_rates: EngineRates
) -> list[DecodeResult]:
    results = []
    for phase, (batch_size, context, seconds) in enumerate(times.decodes, len(times.prefills)):
        rates = Spread.of([batch_size * num_tokens / s for s in seconds])
        runs_per_second = rates.median / (batch_size * num_tokens)
        flops = runs_per_second * batch_size * costs.flops(context, num_tokens, num_tokens)
        read = runs_per_second * costs.decode_bytes(context, num_tokens, batch_size)
        engine = engine_rates.get((batch_size, context))
        results.append(
            DecodeResult(
                batch_size=batch_size,
                context=context,
                tokens_per_second=rates,
                engine_tokens_per_second=Spread.of(engine) if engine else None,
                bytes_per_second=read,
                memory_fraction=_share(read, times.ceilings, phase, MEMORY),
                flops_per_second=flops,
                compute_fraction=_share(flops, times.ceilings, phase, compute_ceiling),
            )
        )
    return results


def _share(rate: float, ceilings: Ceilings | None, phase: int, name: str) -> float | None:
    return None if ceilings is None else rate / ceilings.around(phase)[name]
