"""The CPU device: a model runs in the native runtime, with the kernels of this processor."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tidewheel import _native

from ...cancellation import Cancellation, LoadCancelledError
from ...errors import DeviceError
from ...machine.cgroup import cpu_quota
from ...machine.cpu_list import cpu_list
from ...machine.huge_pages import huge_pages
from ...models.spec import DecoderSpec, StageSpec, TowerSpec
from ...start_log import start_logger
from ...weights.dtypes import DType, KvCacheDType
from ...weights.packed_cache import BackgroundWrite, PackedCache
from ...weights.quantization import CPU_METHODS, Quantization
from ...weights.tensor import WeightSource
from ..base import Capabilities, Device
from ..cache_split import GroupBytes
from ..executor import Executor
from ..limits import ExecutorLimits, ExecutorOptions
from ..load_plan import LoadPlan, load_plan
from ..parallel_options import ParallelOptions
from ..tower import TowerOptions
from .executor import CpuExecutor
from .formats import Formats, formats_of, tower_formats
from .groups import (
    choose_groups,
    group_list,
    groups_by_node,
    groups_in_turn,
    groups_of_stages,
    shared_out,
    spanning_groups,
)
from .lowering import lower
from .options import CpuOptions
from .tower import CpuTower, load_tower, tower_bytes
from .unpacked_experts import PREPACK, unpacked_experts
from .weights import set_weights

logger = logging.getLogger(__name__)


def check_groups(options: CpuOptions, parallel: ParallelOptions, num_stages: int) -> None:
    """Raise DeviceError for groups of cores that cannot be had, or not for each stage. It needs no model."""
    num_groups = parallel.tensor_parallel_size
    if num_stages == 1:
        _groups(options, num_groups)
    else:
        _groups_of_stages(options, num_stages, num_groups)


def take_turns(options: CpuOptions, parallel: ParallelOptions, num_stages: int) -> bool:
    """Whether the stages of a pipeline need more cores than there are. Raises DeviceError for unusable options."""
    return _are_too_few(options, _chosen(options), num_stages * parallel.tensor_parallel_size)


def _are_too_few(options: CpuOptions, groups: Sequence[Sequence[int]], wanted: int) -> bool:
    return options.threads_bind == "auto" and sum(map(len, groups)) < wanted


def _chosen(options: CpuOptions) -> list[list[int]]:
    return choose_groups(options.threads_bind, _native.topology(), cpu_quota(), options.reserved_cpus)


def _groups(options: CpuOptions, num_groups: int) -> list[list[int]]:
    groups = _chosen(options)
    return groups if num_groups == 1 else shared_out(groups, num_groups, named=options.threads_bind != "auto")


def _groups_of_stages(options: CpuOptions, num_stages: int, num_groups: int) -> tuple[list[list[list[int]]], bool]:
    """The processors of each stage, by group, and whether stages take turns on them."""
    groups = _chosen(options)
    if _are_too_few(options, groups, num_stages * num_groups):
        return groups_in_turn([cpu for group in groups for cpu in group], num_stages, num_groups), True
    return groups_of_stages(groups, num_stages, num_groups, named=options.threads_bind != "auto"), False


def thread_groups(isa: str, options: CpuOptions, num_groups: int = 1) -> list[list[int]]:
    """The processors to compute on, by group. Says what was chosen. Raises DeviceError for what cannot be used."""
    groups = _groups(options, num_groups)
    _report_groups(isa, options, groups)
    return groups


def _report_groups(isa: str, options: CpuOptions, groups: Sequence[Sequence[int]]) -> None:
    quota = cpu_quota()
    if options.threads_bind != "auto" and options.reserved_cpus is not None:
        logger.warning("--reserved-cpus has no effect: --threads-bind %s names the cores", options.threads_bind)
    advice = "--threads-bind auto makes a group of each node"
    if options.threads_bind == "auto":
        advice = "use one stage or group for each node, or name cores with --threads-bind"
    for group in spanning_groups(groups, _native.topology()):
        logger.warning(
            "CPUs %s are of several NUMA nodes, so this group of threads reads memory of other nodes; %s",
            cpu_list(group),
            advice,
        )
    count = sum(map(len, groups))
    threads = "1 thread" if count == 1 else f"{count} threads"
    limit = "" if quota is None else f"; the control group allows {quota:g} CPUs' worth of time"
    start_logger.info("Computing with %s kernels in %s on CPUs %s%s", isa, threads, group_list(groups), limit)


def _report_memory() -> None:
    pages = huge_pages()
    said = "huge pages where the kernel has any" if pages.on_request else "small pages"
    mode = pages.transparent or "not supported"
    start_logger.info("Weights and KV cache lie in %s (transparent huge pages: %s)", said, mode)


def _report_unpacked(unpacked: frozenset[str], reason: str | None, cache_dir: str | None) -> None:
    if reason is not None:
        logger.warning("%s=0 has no effect, and experts are packed while they are loaded: %s", PREPACK, reason)
    if unpacked:
        logger.info(
            "%d matrices of experts stay in the checkpoint's files, and are packed when they are used", len(unpacked)
        )
    if unpacked and cache_dir is not None:
        logger.warning("--cache-dir has no effect with %s=0: it would store packed experts", PREPACK)


def default_threads() -> int:
    """How many threads a model has that is alone on the machine."""
    return sum(map(len, _chosen(CpuOptions())))


def own_threads(count: int) -> list[list[int]]:
    """The processors for as many threads, at most one for each core, by group."""
    topology = _native.topology()
    cores = len(topology["cores"])
    return choose_groups("auto", topology, None, cores - min(count, cores))


_MIN_DRAFT_TOKENS, _MAX_DRAFT_TOKENS = 4, 64  # that a recurrent state can go back


class CpuDevice(Device):
    """Native kernels. `isa` names an instruction set level to use instead of the best one."""

    name = "cpu"
    isa: str
    capabilities = Capabilities(
        quantizes=CPU_METHODS, lora=True, draft_models=True, draft_heads=True, stages=True, kv_offload=True, media=True
    )

    def __init__(
        self, options: CpuOptions | None = None, parallel: ParallelOptions | None = None, *, isa: str = "auto"
    ) -> None:
        self._options = options or CpuOptions()
        self._num_groups = (parallel or ParallelOptions()).tensor_parallel_size
        try:
            self.isa = _native.chosen_isa_level(isa)
        except ValueError as error:
            raise DeviceError(str(error)) from error

    def default_dtype(self, checkpoint: DType) -> DType:
        """What the checkpoint is stored as: every level computes with all three."""
        return checkpoint

    def kv_group_bytes(self, spec: DecoderSpec, kv_cache_dtype: KvCacheDType) -> list[GroupBytes]:
        """See Device. Padding and the scales of int8 and int4 are included. Raises DeviceError for latents in int4."""
        blocks = dict.fromkeys(spec.windows(), 0)
        for shape in spec.caches():
            if shape.values_in_keys and kv_cache_dtype == "int4":
                raise DeviceError(
                    f"the cpu device does not cache the latents of {spec.family} in int4: take --kv-cache-dtype int8 "
                    "or fp8_e4m3"
                )
            blocks[shape.window] += _native.kv_bytes_per_block(
                shape.num_heads, shape.key_dim, shape.value_dim, shape.values_in_keys, kv_cache_dtype
            )
        return [GroupBytes(window, block // _native.block_tokens()) for window, block in blocks.items()]

    def max_draft_tokens(self, spec: DecoderSpec) -> int:
        """As many as add a sixth to what a state takes, but at least 4 and at most 64."""
        if not spec.state_bytes:
            return 0
        in_a_sixth = spec.state_bytes // (6 * spec.state_input_bytes)
        return min(max(in_a_sixth, _MIN_DRAFT_TOKENS), _MAX_DRAFT_TOKENS)

    def slot_bytes(self, spec: DecoderSpec) -> int:
        """The state, and what its draft tokens give to the recurrences."""
        return spec.state_bytes + self.max_draft_tokens(spec) * spec.state_input_bytes

    def limits(self, spec: DecoderSpec, options: ExecutorOptions) -> ExecutorLimits:
        """The limits of an executor with these options. Raises DeviceError if the cache is too small."""
        return options.limits(
            self.kv_group_bytes(spec, options.cache_dtype),
            _native.block_tokens(),
            state_bytes=self.slot_bytes(spec),
            max_draft_tokens=self.max_draft_tokens(spec),
        )

    def thread_groups(self) -> list[list[int]]:
        """See Device."""
        return _groups(self._options, self._num_groups)

    def start_threads(self, groups: Sequence[Sequence[int]]) -> _native.ThreadPool:
        """See Device."""
        return _native.ThreadPool(groups)

    def kv_version(self) -> str:
        """The instruction set level, and a digest of the native library: any change to it may change bits."""
        library = Path(_native.__file__).read_bytes()
        return f"{self.isa} {hashlib.blake2b(library, digest_size=16).hexdigest()}"

    def plan(
        self, spec: DecoderSpec, weights: WeightSource, dtype: DType, quantization: Quantization | None
    ) -> LoadPlan:
        """See Device. What the kernels have no form for is dequantized; routed experts may stay in the files."""
        formats = formats_of(spec, dtype, quantization, weights)
        return load_plan(spec, formats, *unpacked_experts(formats, weights))

    def load(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        cancellation: Cancellation | None = None,
    ) -> CpuExecutor:
        """Pack the weights, or take them packed from `cache_dir`; reserve the KV cache, whose pages appear with use."""
        groups = thread_groups(self.isa, self._options, self._num_groups)
        _report_memory()
        # Else the event loop has a processor without taking one from a worker.
        on_all = sum(map(len, groups)) == len(_native.topology()["processors"])
        return self._load(spec, weights, options, cancellation or Cancellation(), groups=groups, yields_cores=on_all)

    def load_stage(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        stage: StageSpec,
        cancellation: Cancellation | None = None,
    ) -> CpuExecutor:
        """The same for some of the model's layers, whose weights alone are in `weights`. The rest is the model's."""
        groups = thread_groups(self.isa, self._options)
        return self._load(spec, weights, options, cancellation or Cancellation(), groups=groups, stage=stage)

    def stage_groups(self, num_stages: int) -> list[list[list[int]]]:
        """The processors of each stage of a pipeline, by group. Raises DeviceError for what cannot be used."""
        stages, take_turns = _groups_of_stages(self._options, num_stages, self._num_groups)
        if take_turns:
            each = "" if self._num_groups == 1 else f" of {self._num_groups} groups each"
            logger.warning(
                "%d stages%s take turns on %d cores, and are slower than one process: lower --pipeline-parallel-size",
                num_stages,
                each,
                len({cpu for stage in stages for group in stage for cpu in group}),
            )
        else:
            _report_groups(self.isa, self._options, [group for stage in stages for group in stage])
        return stages

    def groups_of(self, cpus: Sequence[int]) -> list[list[int]]:
        """These processors in as many groups as each stage of a pipeline has. Raises DeviceError for too few."""
        return groups_by_node(cpus, self._num_groups, _native.topology())

    def bound_to(self, groups: Sequence[Sequence[int]]) -> CpuDevice:
        """The same device on these groups of processors alone."""
        return CpuDevice(replace(self._options, threads_bind=group_list(groups), reserved_cpus=None), isa=self.isa)

    def load_draft(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        beside: Executor,
        cancellation: Cancellation | None = None,
    ) -> CpuExecutor:
        """The same for a draft model, on the threads of `beside`."""
        assert isinstance(beside, CpuExecutor)
        draft = self._load(spec, weights, options, cancellation or Cancellation(), beside=beside.native)
        beside.close_with(draft)
        return draft

    def tower_bytes(self, spec: TowerSpec, weights: WeightSource, options: TowerOptions) -> int:
        """See Device. Some of it is only used while an image is encoded."""
        return tower_bytes(spec, _tower_formats(spec, weights, options), options)

    def load_tower(
        self,
        spec: TowerSpec,
        weights: WeightSource,
        options: TowerOptions,
        beside: Executor | None = None,
        cancellation: Cancellation | None = None,
    ) -> CpuTower:
        """Pack the weights of a tower, or take them packed from `cache_dir`.

        Memory for a segment is reserved, and its pages appear with use.
        """
        assert beside is None or isinstance(beside, CpuExecutor)
        formats = _tower_formats(spec, weights, options)
        groups = _groups(self._options, self._num_groups) if options.threads is None else own_threads(options.threads)
        threads = (self.isa, groups) if beside is None else beside.native
        try:
            cache = self._packed_cache(spec, formats, weights)
            tower = load_tower(spec, weights, formats, options, threads, cancellation or Cancellation(), cache)
        except _native.StoppedError as error:
            raise LoadCancelledError from error
        except ValueError as error:
            raise DeviceError(f"the cpu device cannot load this tower: {error}") from error
        except MemoryError as error:
            raise DeviceError("not enough memory for the model's tower; lower --kv-cache-space") from error
        if beside is not None:
            beside.close_with(tower)
        return tower

    def _load(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        cancellation: Cancellation,
        *,
        groups: list[list[int]] | None = None,
        beside: _native.Executor | None = None,
        yields_cores: bool = False,
        stage: StageSpec | None = None,
    ) -> CpuExecutor:
        limits = self.limits(spec, options)
        plan = self.plan(spec, weights, options.dtype, options.quantization)
        formats, unpacked = plan.formats, plan.in_files
        _report_unpacked(unpacked, plan.why_packed, self._options.cache_dir)
        try:
            native = _native.Executor(
                lower(
                    spec,
                    formats,
                    options.max_model_len,
                    unpacked_experts=bool(unpacked),
                    layer_draft_tokens=options.layer_draft_tokens,
                    kv_scales=options.kv_scales,
                    stage=stage,
                ),
                self.isa,
                options.cache_dtype,
                [group.num_blocks + 1 for group in limits.groups],  # with the padding block
                limits.max_num_seqs,
                limits.max_num_batched_tokens,
                groups or [],
                limits.num_states,
                0 if options.lora is None else options.lora.max_rank,
                limits.max_draft_tokens,
                beside,
            )
            cache = None if unpacked else self._packed_cache(spec, formats, weights, stage)
            with cancellation.calling(native.stop_loading):
                cached = cache is not None and cache.read(native)
                if not cached:
                    set_weights(native, weights, formats, native.num_threads, cancellation, unpacked)
            native.check_complete()
        except _native.StoppedError as error:
            raise LoadCancelledError from error
        except ValueError as error:
            raise DeviceError(f"the cpu device cannot load this model: {error}") from error
        except MemoryError as error:
            raise DeviceError("not enough memory for the weights and the KV cache; lower --kv-cache-space") from error
        write = BackgroundWrite(cache, native) if cache is not None and not cached else None
        lora_dtype = options.dtype if options.lora is None else options.lora.dtype
        return CpuExecutor(native, limits, write, yields_cores=yields_cores, lora_dtype=lora_dtype)

    def _packed_cache(
        self, spec: DecoderSpec | TowerSpec, formats: Formats, weights: WeightSource, stage: StageSpec | None = None
    ) -> PackedCache | None:
        cache_dir = self._options.cache_dir
        if cache_dir is None or weights.identity is None:
            return None
        # Packed weights depend on the spec and the formats only. A field of the spec that does not matter costs at most
        # one more packing.
        facts = (_native.packed_version(), self.isa, repr(spec), repr(formats), weights.identity)
        return PackedCache(cache_dir, facts if stage is None else (*facts, repr(stage)))


def _tower_formats(spec: TowerSpec, weights: WeightSource, options: TowerOptions) -> Formats:
    stored = weights if options.keeps_quantized else None
    return tower_formats(spec, options.dtype, options.quantization, stored)
