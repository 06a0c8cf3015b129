"""Devices of the graph executor, one for each kind of adapter. Nothing here imports torch before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ...cancellation import Cancellation
from ...errors import DeviceError
from ...install_hint import install_command
from ...models.spec import DecoderSpec, LatentAttentionSpec, mixers
from ...weights.dtypes import DType, KvCacheDType
from ...weights.quantization import ACCELERATOR_METHODS, Quantization
from ...weights.tensor import DenseTensor, WeightSource
from ..base import Capabilities, Device
from ..bucketing import BucketPlan, StepSizes
from ..cache_split import GroupBytes
from ..executor import Executor
from ..float_cache import float_cache_dtype, float_group_bytes
from ..grouped_plan import grouped_plan, read_grouped
from ..grouped_weights import GroupedMatrix
from ..limits import ExecutorLimits, ExecutorOptions
from ..load_plan import LoadPlan
from ..memory_options import MemoryOptions
from ..parallel_options import ParallelOptions
from .buckets import plan_buckets
from .memory import MemoryPlan, MemoryUse, plan_memory
from .options import GraphOptions

if TYPE_CHECKING:
    from .adapter import Adapter
    from .decoder import GraphDecoder
    from .parallel import Group

logger = logging.getLogger(__name__)


class Kind(NamedTuple):
    """A kind of accelerator: where its adapter is, which takes GraphOptions, and what is known without the adapter.

    `dtypes` are the types that `--dtype auto` may choose. A checkpoint of another type is computed in the first one.
    `graphs_name` is the vendor's word for graphs, and `graph_name` for one of them, where the log has a line about
    preparing for them.
    """

    name: str
    module: str
    adapter: str
    has_own_memory: bool
    dtypes: tuple[DType, ...]
    graphs_name: str = "graphs"
    graph_name: str | None = None


_CPU = Kind("graph-cpu", ".cpu", "CpuAdapter", False, ("float32", "bfloat16", "float16"))


def graph_cpu(
    options: GraphOptions | None, memory: MemoryOptions | None = None, parallel: ParallelOptions | None = None
) -> GraphDevice:
    """The graph executor on the CPU."""
    return GraphDevice(_CPU, options, memory, parallel)


class GraphDevice(Device):
    """Runs padded launches through torch on one kind of accelerator."""

    def __init__(
        self,
        kind: Kind,
        options: GraphOptions | None = None,
        memory: MemoryOptions | None = None,
        parallel: ParallelOptions | None = None,
    ) -> None:
        self._kind, self._options, self._memory = kind, options or GraphOptions(), memory or MemoryOptions()
        self._size = (parallel or ParallelOptions()).tensor_parallel_size
        self.name = kind.name
        self.capabilities = Capabilities(
            own_memory=kind.has_own_memory, quantizes=ACCELERATOR_METHODS, lora=self._size == 1, ceilings=True
        )

    def default_dtype(self, checkpoint: DType) -> DType:
        """The checkpoint's type, if the device computes with it."""
        return checkpoint if checkpoint in self._kind.dtypes else self._kind.dtypes[0]

    def plan(
        self, spec: DecoderSpec, weights: WeightSource, dtype: DType, quantization: Quantization | None
    ) -> LoadPlan:
        """Quantized matrices as they are, all others in `dtype`. See Device."""
        return grouped_plan(spec, weights, dtype, quantization, num_parts=self._size)

    def kv_group_bytes(self, spec: DecoderSpec, kv_cache_dtype: KvCacheDType) -> list[GroupBytes]:
        """See Device. Raises DeviceError for 8-bit types."""
        return float_group_bytes(self.name, spec, kv_cache_dtype)

    def load(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        cancellation: Cancellation | None = None,
    ) -> Executor:
        """Copy the weights to the device and allocate the cache.

        Raises DeviceError if a package is missing, the cache too small, or a type or a mixer not known.
        """
        plan = self.plan(spec, weights, options.dtype, options.quantization)
        tensors = read_grouped(weights, plan.formats, cancellation or Cancellation())
        return self._share(spec, tensors, options) if self._size > 1 else self.load_part(spec, tensors, options)

    def _share(
        self, spec: DecoderSpec, tensors: Iterator[tuple[str, DenseTensor | GroupedMatrix]], options: ExecutorOptions
    ) -> Executor:
        """Load a part of the model here and the others in processes of their own."""
        from .parallel import Leader, LeadingExecutor
        from .shards import Shards

        shards = Shards(spec, self._size)
        if options.kv_cache_bytes is not None:
            options = replace(options, kv_cache_bytes=options.kv_cache_bytes // self._size)
        leader = Leader(self.name, self._size)
        try:
            leader.join()
            with leader.calling():
                leader.send((self._kind, self._options, self._memory, spec, options))
                parts = leader.scattered((name, shards.cut(name, tensor)) for name, tensor in tensors)
                executor = self.load_part(shards.specs[0], parts, options, leader)
            return LeadingExecutor(executor, leader)
        except BaseException:
            leader.stop()
            raise

    def load_part(
        self,
        spec: DecoderSpec,
        tensors: Iterable[tuple[str, DenseTensor | GroupedMatrix]],
        options: ExecutorOptions,
        group: Group | None = None,
    ) -> Executor:
        """Load the part of a model that `spec` describes. The others in `group` have the other parts."""
        try:
            from .adapter import operations_of
            from .decoder import GraphDecoder
            from .executor import GraphExecutor
            from .loras import LoraSlots
            from .weights import DTYPES

            module = import_module(self._kind.module, __package__)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise DeviceError(f"the {self.name} device needs torch: {install_command('torch')}") from error
        adapter: Adapter = getattr(module, self._kind.adapter)(self._options)
        adapter.enter()
        if group is not None:
            group.share_memory(adapter)
        if options.dtype not in adapter.dtypes:
            known = " or ".join(adapter.dtypes)
            raise DeviceError(f"the {self.name} device does not compute in {options.dtype}: take --dtype {known}")
        # Latents are gathered from whole tables.
        any_width = adapter.any_width and self._options.max_seq_len_to_capture is None and not _has_latents(spec)
        plan = plan_buckets(self._options, _step_sizes(adapter, options, any_width))
        loading, lora = self._memory_use(adapter), options.lora
        with self._room_for(f"the weights in {options.dtype}" + (" and adapters" if lora else "")):
            decoder = GraphDecoder(
                spec,
                tensors,
                dtype=DTYPES[options.dtype],
                cache_dtype=DTYPES[float_cache_dtype(self.name, options.cache_dtype)],
                device=adapter.device,
                block_size=adapter.block_size,
                max_tokens=options.max_num_batched_tokens,
                max_rows=options.max_num_seqs,
                attend=adapter.attend,
                plan_attention=adapter.plan_attention,
                add_up=None if group is None else group.add_up,
                operations=operations_of(adapter),
                loras=None if lora is None else LoraSlots(lora, DTYPES[lora.dtype], adapter.device),
            )
        loading.tell(f"Pre-loading model weights on {adapter.device}")
        if not self.capabilities.own_memory:
            self._memory.warn_of_no_utilization("the device has no memory of its own")
        with self._room_for("the largest step: lower --max-num-batched-tokens or --max-num-seqs"):
            memory = self._profile(adapter, decoder, plan, loading) if self.capabilities.own_memory else None
        limits = self._limits(adapter, spec, options, memory)
        if memory is not None:
            logger.info("# %s blocks: %d, # CPU blocks: 0", self.name.upper(), limits.num_blocks)
        caching = self._memory_use(adapter)
        with self._room_for(
            f"a KV cache of {limits.num_blocks} blocks: lower --num-gpu-blocks-override or --gpu-memory-utilization"
        ):
            # With the block and the slot for padding.
            decoder.allocate([group.num_blocks + 1 for group in limits.groups], limits.num_states + 1)
        caching.tell("Initializing cache engine")
        return GraphExecutor(adapter, decoder, limits, plan, memory, self._options, caching)

    def _memory_use(self, adapter: Adapter) -> MemoryUse:
        """Measures from now on. Of a device that has no memory of its own, nothing is told."""

        def measure() -> tuple[int, int]:
            adapter.synchronize()
            return adapter.memory()

        return MemoryUse(measure if self.capabilities.own_memory else None)

    def _profile(self, adapter: Adapter, decoder: GraphDecoder, plan: BucketPlan, loading: MemoryUse) -> MemoryPlan:
        """Run the largest launches with a cache that holds only padding, and share out the memory that is left.

        `loading` has measured since before the weights were loaded.
        """
        from .launches import Launches
        from .staging import Padding

        buckets = [*plan.prompts, *plan.contexts, *plan.decodes]
        groups = len(decoder.windows)
        decoder.allocate([1] * groups, 1)
        padding = Padding([0] * groups, row=len(decoder.hidden) - 1, state=0)
        wrapping = self._memory_use(adapter)
        launches = Launches(adapter, decoder, buckets, padding, adapter.block_size)
        if adapter.captures and self._kind.graph_name is not None:
            wrapping.tell(f"Wrapping in {self._kind.graph_name}")
        loading.tell("Loading model weights", "took in total")
        profiling = self._memory_use(adapter)
        launches.run_largest(buckets)
        profiling.tell("Model profiling run")
        return plan_memory(
            launches.free_memory(),
            self._memory.gpu_memory_utilization,
            self._options,
            self._kind.graphs_name if adapter.captures else None,
        )

    def _limits(
        self, adapter: Adapter, spec: DecoderSpec, options: ExecutorOptions, memory: MemoryPlan | None
    ) -> ExecutorLimits:
        groups = self.kv_group_bytes(spec, options.cache_dtype)
        kv_cache_bytes = options.kv_cache_bytes
        if memory is not None:
            kv_cache_bytes = min(memory.kv_cache, memory.kv_cache if kv_cache_bytes is None else kv_cache_bytes)
        return replace(
            options.limits(groups, adapter.block_size, kv_cache_bytes, state_bytes=spec.state_bytes),
            mixed_steps=False,
            chunked_prefill=adapter.chunked_prefill,
            max_prefill_seqs=adapter.max_prefill_seqs,
        )

    @contextmanager
    def _room_for(self, what: str) -> Iterator[None]:
        """Raises DeviceError if the device runs out of memory."""
        import torch

        try:
            yield
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"the {self.name} device has no memory for {what}") from error


def _has_latents(spec: DecoderSpec) -> bool:
    return any(isinstance(mixer, LatentAttentionSpec) for layer in spec.layers for mixer in mixers(layer))


def _step_sizes(adapter: Adapter, options: ExecutorOptions, any_width: bool) -> StepSizes:
    max_tokens = options.max_num_batched_tokens
    return StepSizes(
        block_size=adapter.block_size,
        # Prompts that run whole must fit into a step, also when they are computed again with their answers.
        max_model_len=options.max_model_len if adapter.chunked_prefill else min(options.max_model_len, max_tokens),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_prefill_seqs=adapter.max_prefill_seqs,
        any_width=any_width,
    )
