"""The device itself. Nothing here imports jax before a model is loaded."""

from __future__ import annotations

import logging
from collections import Counter

from ...cancellation import Cancellation
from ...errors import DeviceError
from ...models.spec import DecoderSpec
from ...weights.dtypes import STORAGE, DType, KvCacheDType
from ...weights.quantization import ACCELERATOR_METHODS, Quantization
from ...weights.tensor import WeightSource
from ..base import Capabilities, Device
from ..cache_split import GroupBytes
from ..executor import Executor
from ..grouped_plan import grouped_plan
from ..grouped_weights import num_bytes_with_floats
from ..limits import ExecutorOptions
from ..load_plan import LoadPlan
from ..memory_options import MemoryOptions
from ..parallel_options import ParallelOptions
from .heads import Kernel, state_bytes, with_heads_for
from .options import TpuOptions
from .platform import require_platform, runs_on_cpu

logger = logging.getLogger(__name__)


class TpuDevice(Device):
    """The TPUs of this machine, or with JAX_PLATFORMS=cpu the devices that JAX makes of its processors."""

    name = "tpu"

    def __init__(
        self,
        options: TpuOptions | None = None,
        memory: MemoryOptions | None = None,
        parallel: ParallelOptions | None = None,
    ) -> None:
        self._options, self._memory = options or TpuOptions(), memory or MemoryOptions()
        self._num_devices = (parallel or ParallelOptions()).tensor_parallel_size

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """A TPU has memory of its own."""
        return Capabilities(own_memory=not runs_on_cpu(), quantizes=ACCELERATOR_METHODS, lora=True, ceilings=True)

    def default_dtype(self, checkpoint: DType) -> DType:
        """bfloat16, the type that a TPU multiplies."""
        return "bfloat16"

    def plan(
        self, spec: DecoderSpec, weights: WeightSource, dtype: DType, quantization: Quantization | None
    ) -> LoadPlan:
        """Quantized matrices as they are, all others in `dtype`. See Device."""
        # A table that is also multiplied with would be there twice, in a layout for each, with more bytes than floats.
        in_floats = ["embed.weight"] if spec.head.tied else []
        parts = self._num_devices
        return grouped_plan(
            spec,
            weights,
            dtype,
            quantization,
            num_parts=parts,
            in_floats=in_floats,
            bytes_of=num_bytes_with_floats,
        )

    def kv_group_bytes(self, spec: DecoderSpec, kv_cache_dtype: KvCacheDType) -> list[GroupBytes]:
        """See Device; over all chips. Raises DeviceError if they cannot share the model's heads."""
        kernel = self._kernel(kv_cache_dtype)
        sizes = dict.fromkeys(spec.windows(), 0)
        for attention in with_heads_for(spec, self._num_devices).attentions():
            if attention.cached is None:
                continue
            values = 2 * attention.num_kv_heads * kernel.cached_head_dim(attention)
            sizes[attention.sliding_window] += values * kernel.itemsize
        for latents in (shape for shape in spec.caches() if shape.values_in_keys):
            sizes[latents.window] += latents.values * kernel.itemsize * self._num_devices  # every chip has them
        return [GroupBytes(window, size) for window, size in sizes.items()]

    def slot_bytes(self, spec: DecoderSpec) -> int:
        """Over all chips. See Device."""
        return state_bytes(spec, self._num_devices)

    def load(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        cancellation: Cancellation | None = None,
    ) -> Executor:
        """Copy the weights to the chips and allocate the cache.

        Raises DeviceError if jax or the TPU is missing, the cache too small, or for what the device does not compute.
        """
        if options.dtype == "float16":
            raise DeviceError("the tpu device computes in bfloat16 or float32, not in float16: choose --dtype bfloat16")
        kernel = self._kernel(options.cache_dtype)
        groups = self.kv_group_bytes(spec, options.cache_dtype)
        require_platform()
        from .compile_cache import use_compile_cache
        from .loading import Loader
        from .mesh import make_mesh

        plan = self.plan(spec, weights, options.dtype, options.quantization)
        spec = with_heads_for(spec, self._num_devices)
        _report(spec, kernel)
        use_compile_cache(self._options.xla_cache_path)
        mesh = make_mesh(self._num_devices)
        slot_bytes = self.slot_bytes(spec)
        loader = Loader(spec, options, self._options, self._memory, kernel, groups, slot_bytes, mesh)
        return loader.load(weights, plan, cancellation or Cancellation())

    def _kernel(self, kv_cache_dtype: KvCacheDType) -> Kernel:
        if kv_cache_dtype != "float32" and kv_cache_dtype != "bfloat16":
            raise DeviceError(
                f"the tpu device caches K and V as bfloat16 or float32, not {kv_cache_dtype}: "
                "choose one of them with --kv-cache-dtype, or --device cpu"
            )
        return Kernel(not runs_on_cpu(), self._num_devices, STORAGE[kv_cache_dtype].itemsize)


def _report(spec: DecoderSpec, kernel: Kernel) -> None:
    """Say why layers are not computed by the kernel for TPUs, or by it in more than one go."""
    if not kernel.available:
        logger.warning("JAX_PLATFORMS=cpu: the tpu device computes on the processor, which is slow and meant for tests")
        return
    without = Counter(filter(None, map(kernel.refusal, spec.attentions())))
    for reason, count in without.items():
        logger.warning("Attention of %d layers runs without the TPU's kernel, which does not support %s", count, reason)
    apart = Counter(filter(None, map(kernel.separation, filter(kernel.computes, spec.attentions()))))
    for reason, count in apart.items():
        logger.info("Attention of %d layers computes one KV head after the other because of %s", count, reason)
