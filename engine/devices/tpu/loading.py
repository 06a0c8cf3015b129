"""From weights to an executor: what lies on the chips, and how large the cache may be."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jax.sharding import Mesh

from ...cancellation import Cancellation
from ...errors import DeviceError
from ...models.spec import DecoderSpec
from ...weights.tensor import WeightSource
from ..cache_split import GroupBytes
from ..limits import ExecutorLimits, ExecutorOptions
from ..load_plan import LoadPlan
from ..memory_options import MemoryOptions
from .buckets import max_sequences, page_size, row_buckets, token_buckets
from .cache import cache_arrays
from .decoder import TpuDecoder
from .executor import Loaded, TpuExecutor
from .heads import Kernel
from .loras import lora_arrays, rank_sizes
from .mesh import first_chip, replicated
from .mixers import Params
from .options import TpuOptions
from .programs import Programs
from .weights import place_weights

logger = logging.getLogger(__name__)

_GIB = 2**30


class Loader:
    """Loads one model. `groups` and `state_bytes` are the bytes of its cache groups and of a slot of recurrent state,
    over all chips, which are those of the mesh.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        options: ExecutorOptions,
        tpu: TpuOptions,
        memory: MemoryOptions,
        kernel: Kernel,
        groups: Sequence[GroupBytes],
        state_bytes: int,
        mesh: Mesh,
    ) -> None:
        self._spec, self._memory, self._kernel, self._groups = spec, memory, kernel, groups
        self._state_bytes = state_bytes
        self._block_size = page_size(options.max_model_len, options.max_num_seqs)
        self._options = replace(options, max_num_seqs=self._max_num_seqs(options))
        self._width = -(-options.max_model_len // self._block_size)
        self._token_sizes = token_buckets(options.max_num_batched_tokens, tpu.tpu_bucket_padding_gap)
        self._row_sizes = row_buckets(self._options.max_num_seqs)
        self._mesh = mesh
        self._decoder = TpuDecoder(spec, mesh, kernel.computes)

    def load(self, weights: WeightSource, plan: LoadPlan, cancellation: Cancellation) -> TpuExecutor:
        """The executor, with the weights as planned.

        Raises DeviceError and ModelError, and LoadCancelledError soon after it was cancelled.
        """
        options = self._options
        params = place_weights(self._spec, weights, plan, options.dtype, self._mesh, cancellation)
        loras = None if options.lora is None else _zeros(lora_arrays(self._spec, options.lora, self._mesh))
        limits = options.limits(
            self._groups, self._block_size, self._cache_bytes(params), state_bytes=self._state_bytes
        )
        limits = replace(limits, async_scheduling=True)
        programs = self.programs(params, limits)
        try:
            loaded = jax.block_until_ready(Loaded(params, loras, *_zeros((list(programs.cache), programs.hidden))))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise DeviceError(
                f"the tpu device has no memory for a KV cache of {limits.num_blocks} blocks: "
                "lower --num-gpu-blocks-override, --gpu-memory-utilization or --kv-cache-space"
            ) from error
        return TpuExecutor(limits, programs, loaded, self._token_sizes, self._row_sizes, options.lora)

    def programs(self, params: Params, limits: ExecutorLimits) -> Programs:
        """The model's programs with caches of that size. `params` have only to say sizes, types and shardings."""
        blocks = {group.window: group.num_blocks + 1 for group in limits.groups}  # with the padding block
        cache = cache_arrays(
            self._decoder.kept,
            self._kernel,
            self._mesh,
            blocks,
            self._block_size,
            self._options.cache_dtype,
            limits.num_states + 1,
        )
        hidden = ShapeDtypeStruct(
            (self._token_sizes[-1], self._spec.hidden_size), jnp.float32, sharding=replicated(self._mesh)
        )
        lora = self._options.lora
        return Programs(
            self._decoder,
            self._mesh,
            len(limits.groups),
            self._width,
            self._row_sizes[-1],
            params,
            cache,
            hidden,
            None if lora is None else lora_arrays(self._spec, lora, self._mesh),
        )

    def _max_num_seqs(self, options: ExecutorOptions) -> int:
        most = max_sequences(options.max_model_len, self._block_size)
        if options.max_num_seqs <= most:
            return options.max_num_seqs
        logger.warning(
            "--max-num-seqs is lowered from %d to %d, because the block tables of contexts of %d tokens must fit into "
            "the TPU's scalar memory; a smaller --max-model-len allows more",
            options.max_num_seqs,
            most,
            options.max_model_len,
        )
        return most

    def _cache_bytes(self, params: Params) -> int | None:
        """What all chips have for the cache beside weights and the largest step; None where the options say."""
        options = self._options
        if options.num_blocks is not None:
            self._memory.warn_of_no_utilization("--num-gpu-blocks-override is the size of the KV cache")
            return None
        if options.kv_cache_bytes is not None:
            on_chip = self._kernel.available
            self._memory.warn_of_no_utilization(
                "--kv-cache-space is the size of the KV cache" if on_chip else "the device has no memory of its own"
            )
            return None
        statistics = first_chip(self._mesh).memory_stats()
        if statistics is None:
            raise DeviceError("JAX does not say how much memory the TPU has: size the KV cache with --kv-cache-space")
        total, taken = int(statistics["bytes_limit"]), int(statistics["bytes_in_use"])
        needed = self.working_bytes(params)
        utilization = self._memory.gpu_memory_utilization
        cache = int(max(total - taken - needed, 0) * utilization)
        logger.info(
            "A chip has %.2f GiB of memory: weights take %.2f GiB, a step and its sampling %.2f GiB, and the KV cache "
            "gets %.2f GiB of the rest (gpu_memory_utilization=%g)",
            total / _GIB,
            taken / _GIB,
            needed / _GIB,
            cache / _GIB,
            utilization,
        )
        return cache * self._kernel.num_devices

    def working_bytes(self, params: Params) -> int:
        """What programs take on a chip beside weights and cache, as compiled: the most of a step and its sampling.

        They run one after the other, so they share their temporary memory. The logits of two steps may be there at a
        time, while those of the first are fetched. All programs stay on the chip.
        """
        options = self._options
        smallest = replace(options, num_blocks=1).limits(self._groups, self._block_size, state_bytes=self._state_bytes)
        programs, ranks = self.programs(params, smallest), rank_sizes(options.lora)
        largest = (
            programs.step(self._token_sizes[-1], options.max_num_seqs, ranks[-1]),
            programs.head(self._row_sizes[-1], ranks[-1]),
        )
        step, head = (program.compile().memory_analysis() for program in largest)
        code = len(self._token_sizes) * step.generated_code_size_in_bytes
        code += len(self._row_sizes) * head.generated_code_size_in_bytes
        hidden = programs.hidden.size * programs.hidden.dtype.itemsize
        temporary = max(step.temp_size_in_bytes, head.temp_size_in_bytes)
        return int(temporary + 2 * head.output_size_in_bytes + hidden + len(ranks) * code)


def _zeros(described: Any) -> Any:
    """Arrays of zeros on the chips, in the same tree."""
    shardings = jax.tree.map(lambda array: array.sharding, described)
    zeros = jax.jit(
        lambda: jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), described), out_shardings=shardings
    )
    return zeros()
