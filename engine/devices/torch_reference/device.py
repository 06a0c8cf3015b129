"""The device itself. Nothing here imports torch before a model is loaded."""

from __future__ import annotations

from ...cancellation import Cancellation
from ...errors import DeviceError
from ...install_hint import install_command
from ...models.spec import AttentionSpec, DecoderSpec, TowerSpec, mixers, tower_shapes
from ...weights.dtypes import DType, KvCacheDType
from ...weights.finite import read_finite
from ...weights.quantization import Quantization
from ...weights.tensor import WeightSource
from ..base import Capabilities, Device
from ..cache_split import BLOCK_TOKENS, GroupBytes
from ..executor import Executor
from ..float_cache import float_cache_dtype, float_group_bytes
from ..limits import ExecutorOptions
from ..load_plan import LoadPlan, dense_plan, weight_bytes
from ..tower import TowerExecutor, TowerOptions


class TorchDevice(Device):
    """Runs on the CPU through torch, which is imported when a model is loaded."""

    name = "torch"
    capabilities = Capabilities(lora=True, media=True)

    def default_dtype(self, checkpoint: DType) -> DType:
        """What the checkpoint is stored as: torch computes with all of them."""
        return checkpoint

    def plan(
        self, spec: DecoderSpec, weights: WeightSource, dtype: DType, quantization: Quantization | None
    ) -> LoadPlan:
        """All matrices in `dtype`. See Device."""
        return dense_plan(spec, dtype)

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
        """Copy the weights and allocate the cache.

        Raises DeviceError if torch is missing, the cache too small, or a mixer is of a kind that is not known.
        """
        try:
            from .decoder import TorchDecoder
            from .executor import TorchExecutor
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise DeviceError(f"the torch device needs torch: {install_command('torch')}") from error
        if options.quantization is not None:
            raise DeviceError("the torch device does not quantize weights: drop --quantization or take --device cpu")
        limits = options.limits(
            self.kv_group_bytes(spec, options.cache_dtype), BLOCK_TOKENS, state_bytes=spec.state_bytes
        )
        tensors = read_finite(weights, cancellation or Cancellation())
        blocks = [group.num_blocks + 1 for group in limits.groups]  # with the padding block
        cached = float_cache_dtype(self.name, options.cache_dtype)
        lora_dtype = "float32" if options.lora is None else options.lora.dtype
        decoder = TorchDecoder(
            spec, tensors, options.dtype, cached, blocks, BLOCK_TOKENS, limits.num_states, lora_dtype
        )
        return TorchExecutor(decoder, limits)

    def tower_bytes(self, spec: TowerSpec, weights: WeightSource, options: TowerOptions) -> int:
        """All weights in float32, and the scores of one layer."""
        heads = [
            mixer.num_heads for layer in spec.layers for mixer in mixers(layer) if isinstance(mixer, AttentionSpec)
        ]
        return weight_bytes(tower_shapes(spec), {}) + 4 * options.max_rows**2 * max(heads, default=0)

    def load_tower(
        self,
        spec: TowerSpec,
        weights: WeightSource,
        options: TowerOptions,
        beside: Executor | None = None,
        cancellation: Cancellation | None = None,
    ) -> TowerExecutor:
        """Copy the weights. Raises DeviceError for a quantization."""
        from .executor import TorchExecutor
        from .tower import TorchTower

        assert beside is None or isinstance(beside, TorchExecutor)
        if options.quantization is not None:
            raise DeviceError("the torch device does not quantize weights: drop --quantization or take --device cpu")
        tower = TorchTower(spec, weights, options, cancellation or Cancellation())
        if beside is not None:
            beside.close_with(tower)
        return tower
