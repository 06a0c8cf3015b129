"""The run as a whole: start-up, then the device alone, then the engine, with the ceilings in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tidewheel import __version__
from tidewheel.engine.core.engine import Engine
from tidewheel.engine.devices.cpu.groups import choose_groups
from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.errors import ModelError, TidewheelError
from tidewheel.engine.loading.inspection import shape_of
from tidewheel.engine.loading.opened_model import OpenedModel
from tidewheel.engine.machine.cgroup import cpu_quota
from tidewheel.engine.options import EngineOptions

from ...http import event_loop
from ...options.model import DEMO_MODEL_NAME, MODEL_OPTIONS, engine_options
from ..devices import cpu_model
from .ceilings import CeilingMeter, NativeCeilings
from .costs import Costs
from .device_runs import DeviceRuns, PhaseTimes
from .engine_runs import decode_rates
from .model import LoadedModel, Plan, load, plan, tensor_bytes
from .padding import padding_of
from .process_memory import OwnPeak
from .report import MachineFacts, MemoryUse, ModelFacts, Report
from .results import DeviceTimes, EngineRates, decode_results, prefill_results
from .startup import measure_startup
from .weights_read import EXPERTS_COUNTED
from .workload import Decode, Prefill, Workload

Say = Callable[[str], None]

_CACHED_FRACTION = 1.2  # of the memory ceiling, which is itself measured no better than this
_NO_STEP_LIMIT_MS = 1e9  # nothing else is running that a long prompt could hold up


def measure(given: Mapping[str, Any], asked: Workload, skip: frozenset[str], say: Say) -> Report:
    """Measure a model, without the parts to `skip` (engine, startup). `say` gets progress messages.

    `given` are the engine's options that were given, by name. Raises TidewheelError if the model cannot be loaded or
    the workload does not fit.
    """
    name = given.get("model") or DEMO_MODEL_NAME
    planned = plan(engine_options(given), asked)
    workload, opened = planned.workload, planned.opened
    peak = OwnPeak()
    native = _native_ceilings(planned.options, workload.ceilings_s) if _on_processor(opened) else None
    notes: list[str] = []
    if left_out := [str(decode) for decode in asked.long_decodes if decode not in workload.long_decodes]:
        notes.append(f"left out, because they do not fit: decodes of {'; '.join(left_out)}")
    startup = None
    if "startup" not in skip:
        say("start-up")
        try:
            startup = measure_startup(serve_arguments(given), workload.repeats)
        except TidewheelError as error:
            notes.append(f"start-up was not measured: {error}")
    say("loading the model")
    loaded = load(planned)
    measure_ceilings = native or _own_ceilings(planned, loaded)
    meter = None if measure_ceilings is None else CeilingMeter(measure_ceilings, peak)
    if meter is None:
        takes = "the native extension, which is not installed" if _on_processor(opened) else "another device"
        notes.append(f"the ceilings were not measured: that takes {takes}")
    # One thread for all the device's steps, and not this one: it is pinned to a core, and works as one of the team.
    # It lives on while the engine runs, so that the engine's thread is sure to count as another one.
    with ThreadPoolExecutor(1, thread_name_prefix="tidewheel-bench") as steps:
        try:
            times = steps.submit(_device_phases, planned, loaded, meter, say).result()
            padding = padding_of(loaded.executor)  # the engine closes it
            engine_rates: EngineRates = {}
            if "engine" not in skip:
                say("decode through the engine")
                try:
                    engine_rates = _through_engine(planned, loaded, name)
                except TidewheelError as error:
                    notes.append(f"the engine was not measured: {error}")
        finally:
            loaded.executor.close()
    costs = Costs(
        opened.spec,
        tensor_bytes=tensor_bytes(opened),
        weight_bytes=loaded.weight_bytes,
        kv_groups=opened.kv_groups,
    )
    compute_ceiling = planned.compute_ceiling
    decode = decode_results(times, costs, compute_ceiling, workload.decode_tokens, engine_rates)
    if any((result.memory_fraction or 0.0) > _CACHED_FRACTION for result in decode):
        notes.append("more was read than memory can deliver: the model, or much of it, was in the caches")
    return Report(
        version=__version__,
        model=_model(planned, loaded, name),
        machine=_machine(planned, loaded, native),
        repeats=workload.repeats,
        decode_tokens=workload.decode_tokens,
        ceilings=None if times.ceilings is None else times.ceilings.spreads(),
        compute_ceiling=compute_ceiling,
        prefill=prefill_results(times, costs, compute_ceiling),
        decode=decode,
        padding=padding,
        startup=startup,
        memory=MemoryUse(
            server_ready=None if startup is None else startup.resident_bytes,
            server_peak=None if startup is None else startup.peak_bytes,
            bench_peak=peak.bytes,
        ),
        experts_counted=EXPERTS_COUNTED if costs.weights.routed else None,
        notes=notes,
    )


def serve_arguments(given: Mapping[str, Any]) -> list[str]:
    """The arguments of a `tidewheel serve` that is given the same options of the engine."""
    arguments = []
    for option in MODEL_OPTIONS:
        value = given.get(option.name, option.default)
        if value == option.default:
            continue
        if option.is_switch:
            arguments.append(option.flag if value else option.flag.replace("--", "--no-", 1))
        else:
            arguments += [option.flag, "0" if value is None else str(value)]
    return arguments


def _on_processor(opened: OpenedModel) -> bool:
    """Whether the native ceilings are the device's own."""
    return opened.device.name in ("cpu", "torch")


def _native_ceilings(options: EngineOptions, seconds: float) -> NativeCeilings | None:
    try:
        from tidewheel import _native
        from tidewheel.engine.devices.cpu.device import CpuDevice
    except ImportError:
        return None
    cpu = next((group for group in options.device_options if isinstance(group, CpuOptions)), CpuOptions())
    groups = choose_groups(cpu.threads_bind, _native.topology(), cpu_quota())
    return NativeCeilings(CpuDevice().isa, [cpu for group in groups for cpu in group], seconds)


def _own_ceilings(planned: Plan, loaded: LoadedModel) -> Callable[[], dict[str, float]] | None:
    if not planned.opened.device.capabilities.ceilings:
        return None
    return partial(loaded.executor.measure_ceilings, planned.opened.dtype, planned.workload.ceilings_s)


def _model(planned: Plan, loaded: LoadedModel, name: str) -> ModelFacts:
    return ModelFacts(
        name=name,
        shape=shape_of(planned.opened.spec),
        dtype=planned.opened.kept_as,
        load_format=planned.options.load_format,
        weight_bytes=loaded.weight_bytes,
        kv_bytes_per_token=planned.opened.kv_bytes_per_token,
    )


def _machine(planned: Plan, loaded: LoadedModel, native: NativeCeilings | None) -> MachineFacts:
    computes = native if planned.opened.device.name == "cpu" else None
    return MachineFacts(
        cpu_model=cpu_model(),
        device=planned.opened.device.name,
        isa=None if computes is None else computes.isa,
        threads=loaded.num_threads,
        cpus=None if computes is None else computes.cpus,
    )


def _device_phases(planned: Plan, loaded: LoadedModel, meter: CeilingMeter | None, say: Say) -> DeviceTimes:
    workload = planned.workload
    runs = DeviceRuns(loaded.executor, planned.opened.spec.vocab_size, planned.options.seed or 0, loaded.profiler)

    def ceilings() -> None:
        if meter is not None:
            meter.measure()

    ceilings()
    prefills: list[tuple[Prefill, PhaseTimes]] = []
    for prefill in workload.prefills:
        say(f"prefill {prefill}")
        prefills.append((prefill, runs.prefill(prefill, workload.repeats)))
        ceilings()
    decodes: list[tuple[Decode, PhaseTimes]] = []
    for decode in workload.all_decodes:
        say(f"decode {decode}")
        decodes.append((decode, runs.decode(decode, workload.decode_tokens, workload.repeats)))
        ceilings()
    return DeviceTimes(prefills, decodes, None if meter is None else meter.result())


def _through_engine(planned: Plan, loaded: LoadedModel, name: str) -> EngineRates:
    opened, options = planned.opened, planned.options
    try:
        tokenizer = opened.tokenizer()
    except ModelError as error:
        raise TidewheelError(f"it needs a tokenizer, but {error}") from error
    engine = Engine(
        loaded.executor,
        tokenizer,
        model_name=name,
        max_model_len=planned.max_model_len,
        vocab_size=opened.spec.vocab_size,
        max_step_ms=_NO_STEP_LIMIT_MS,
        enable_prefix_caching=options.enable_prefix_caching,
    )
    return event_loop.run(decode_rates(engine, planned.workload, opened.spec.vocab_size, options.seed or 0))
