"""The contract between the engine and a device: Device here, Executor and ExecutorLimits beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..cancellation import Cancellation
from ..declaring.record import record
from ..models.spec import DecoderSpec, StageSpec, TowerSpec
from ..weights.dtypes import DType, KvCacheDType
from ..weights.quantization import Method, Quantization
from ..weights.tensor import WeightSource
from .cache_split import GroupBytes
from .executor import DraftExecutor, Executor
from .limits import ExecutorLimits, ExecutorOptions
from .load_plan import LoadPlan
from .tower import TowerExecutor, TowerOptions


@record(frozen=True, slots=True)
class Capabilities:
    """What a device can do in addition to running a decoder.

    `own_memory`: weights and cache do not lie in the machine's memory. The device itself makes sure that they fit. If
    `kv_cache_bytes` is None, it sizes the cache when the weights are loaded. `quantizes`: the methods of
    ExecutorOptions.quantization by which it stores weights. `lora`: its executors have adapters. `draft_models`: it
    runs a draft model beside another one. `draft_heads`: its executors draft with a spec's `mtp` or `eagle3` layer.
    `stages`: a process can have some layers of a model. `kv_offload`: KV blocks can be kept elsewhere, for models that
    have only full attention. `ceilings`: its executors measure the most that the device can do. `media`: its executors
    take rows of media in place of tokens, and it loads towers.
    """

    own_memory: bool = False
    quantizes: tuple[Method, ...] = ()
    lora: bool = False
    draft_models: bool = False
    draft_heads: bool = False
    stages: bool = False
    kv_offload: bool = False
    ceilings: bool = False
    media: bool = False


class Device(ABC):
    """Something that can load a spec. `name` is what `--device` calls it.

    A device implements the abstract methods. Methods that raise NotImplementedError are called only if the device's
    `capabilities` say that it has them.
    """

    name: str
    capabilities: Capabilities
    isa: str | None = None
    """The instruction set level in use, where there is a choice of them."""

    @abstractmethod
    def default_dtype(self, checkpoint: DType) -> DType:
        """What `--dtype auto` means for a checkpoint stored as `checkpoint`."""

    @abstractmethod
    def kv_group_bytes(self, spec: DecoderSpec, kv_cache_dtype: KvCacheDType) -> list[GroupBytes]:
        """Bytes of KV cache that a token takes in each cache group, in the order of `spec.windows()`.

        Raises DeviceError for a type that it cannot cache.
        """

    def kv_bytes_per_token(self, spec: DecoderSpec, kv_cache_dtype: KvCacheDType) -> int:
        """The same over all layers."""
        return sum(group.bytes_per_token for group in self.kv_group_bytes(spec, kv_cache_dtype))

    @abstractmethod
    def plan(
        self, spec: DecoderSpec, weights: WeightSource, dtype: DType, quantization: Quantization | None
    ) -> LoadPlan:
        """What `load` will have in memory with ExecutorOptions of this `dtype` and `quantization`.

        Raises DeviceError for what cannot be.
        """

    @abstractmethod
    def load(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        cancellation: Cancellation | None = None,
    ) -> Executor:
        """Pack the weights as `plan` says and allocate the cache, from any thread.

        Raises DeviceError, naming what is not supported, and LoadCancelledError soon after it was cancelled.
        """

    def thread_groups(self) -> list[list[int]] | None:
        """The processors that its executors compute on with threads of this process, by group; None: with none that
        executors could share. Raises DeviceError for what cannot be used.
        """
        return None

    def start_threads(self, groups: Sequence[Sequence[int]]) -> object:
        """Threads on these processors, which executors can be given: see `Executor.use_threads`."""
        raise NotImplementedError

    def max_draft_tokens(self, spec: DecoderSpec) -> int:
        """How many draft tokens of a sequence a step of a recurrent model may have: the state can go back behind them.

        0 for a spec without recurrent layers.
        """
        return 0

    def slot_bytes(self, spec: DecoderSpec) -> int:
        """Bytes of a sequence's recurrent state, with what it takes to go back."""
        return spec.state_bytes

    def kv_version(self) -> str:
        """Changes whenever the same weights and tokens may give other bits of K and V. May read a file."""
        raise NotImplementedError

    def load_draft(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        beside: Executor,
        cancellation: Cancellation | None = None,
    ) -> DraftExecutor:
        """Load a draft model on the processors of `beside`, an executor of this device, which is idle meanwhile.

        `options` give it as many blocks as the other one's first cache group has. Raises what `load` raises.
        """
        raise NotImplementedError

    def tower_bytes(self, spec: TowerSpec, weights: WeightSource, options: TowerOptions) -> int:
        """About how many bytes a tower takes: its weights, and what it computes with while a segment is the largest.

        Raises DeviceError for what cannot be.
        """
        raise NotImplementedError

    def load_tower(
        self,
        spec: TowerSpec,
        weights: WeightSource,
        options: TowerOptions,
        beside: Executor | None = None,
        cancellation: Cancellation | None = None,
    ) -> TowerExecutor:
        """Load a tower on the processors of `beside`, an executor of this device, which is idle meanwhile, or alone.

        `weights` have the names of `tower_shapes(spec)`. `beside` closes it. Raises what `load` raises.
        """
        raise NotImplementedError

    def limits(self, spec: DecoderSpec, options: ExecutorOptions) -> ExecutorLimits:
        """The limits of the whole model, the same for all stages. Raises DeviceError if the cache is too small."""
        raise NotImplementedError

    def stage_groups(self, num_stages: int) -> list[list[list[int]]]:
        """The processors of each stage, by group. Raises DeviceError if they cannot be shared out."""
        raise NotImplementedError

    def groups_of(self, cpus: Sequence[int]) -> list[list[int]]:
        """These processors in as many groups as a stage has. Raises DeviceError if they cannot be shared out."""
        raise NotImplementedError

    def bound_to(self, groups: Sequence[Sequence[int]]) -> Device:
        """The device on these groups of processors alone."""
        raise NotImplementedError

    def load_stage(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        stage: StageSpec,
        cancellation: Cancellation | None = None,
    ) -> Executor:
        """Load the layers of a stage. `weights` have theirs alone; `spec` and `options` are the model's."""
        raise NotImplementedError
