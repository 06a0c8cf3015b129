"""The contract between the engine and a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..cancellation import Cancellation
from ..errors import DeviceError
from ..models.spec import DecoderSpec, StageSpec
from ..weights.dtypes import DType, KvCacheDType
from ..weights.kv_scales import KvScales
from ..weights.lora import LoraAdapter
from ..weights.quantization import Quantization
from ..weights.tensor import WeightSource
from .batch import StepBatch, StepOutput
from .bucket_stats import BucketStats
from .cache_split import CacheSplit, GroupBytes, StateSplit, blocks_without_kv, keeps_kv
from .load_plan import LoadPlan


class LoraLimits(Struct, frozen=True):
    """Which adapters there may be: at most `max_loras` in one step, with ranks up to `max_rank`, kept as `dtype`."""

    max_loras: int
    max_rank: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """What any device is asked to provide. `max_model_len` is in tokens.

    `dtype` is the weights', `kv_cache_dtype` that of the cached K and V. `kv_cache_bytes` bounds the KV cache; it is
    None only for a device with memory of its own, which then finds out what the weights leave. `num_blocks` goes before
    it: the first cache group has so many blocks.
    """

    dtype: DType
    kv_cache_bytes: int | None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: KvCacheDType | None = None  # None: as `dtype`
    kv_scales: KvScales | None = None  # of fp8_e4m3; None: all are 1
    quantization: Quantization | None = None  # None: all weights are of `dtype`
    lora: LoraLimits | None = None  # None: there are no adapters
    num_blocks: int | None = None  # None: as many as fit
    layer_draft_tokens: int = 0  # most in a draft of the spec's layer for them

    @property
    def cache_dtype(self) -> KvCacheDType:
        """What K and V are cached as."""
        return self.kv_cache_dtype or self.dtype

    def limits(
        self,
        groups: Sequence[GroupBytes],
        block_size: int,
        kv_cache_bytes: int | None = None,
        *,
        state_bytes: int = 0,
        max_draft_tokens: int = 0,
    ) -> ExecutorLimits:
        """Those of a device that has nothing to add to them. Raises DeviceError if the cache is too small.

        `kv_cache_bytes` is what the device has found that it can spend, else that of the options. `state_bytes` is a
        slot for the recurrent state of one sequence, with what it takes to go back behind `max_draft_tokens`; its slots
        are a part of the cache.
        """
        size = self.kv_cache_bytes if kv_cache_bytes is None else kv_cache_bytes
        has_kv, num_blocks = keeps_kv(groups), self.num_blocks
        if num_blocks is not None:
            states = StateSplit.whole(state_bytes, self.max_num_seqs)
        else:
            assert size is not None
            states = StateSplit.within(size, state_bytes, self.max_num_seqs, beside_kv=has_kv)
            if not has_kv:
                num_blocks = blocks_without_kv(states.max_num_seqs, self.max_model_len, block_size)
        most = states.max_num_seqs, self.max_num_batched_tokens
        split = CacheSplit(groups, block_size, *most)
        if num_blocks is None:
            assert size is not None
            first, *others = split.blocks(size - states.num_bytes)
        else:
            first, *others = split.beside(num_blocks)
        windows = [group.window for group in groups]
        return ExecutorLimits(
            block_size,
            first,
            *most,
            window=windows[0],
            window_groups=tuple(CacheGroup(count, window) for count, window in zip(others, windows[1:], strict=True)),
            num_states=states.num_states,
            max_draft_tokens=max_draft_tokens if states.num_states else 0,
            max_loras=0 if self.lora is None else self.lora.max_loras,
        )


class StepShape(Struct, frozen=True):
    """The size of a step in which every sequence takes the room of the longest, `query_len` tokens."""

    num_sequences: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the step takes the room of."""
        return self.num_sequences * self.query_len

    def holds(self, other: StepShape) -> bool:
        """Whether a step of that shape can be padded to this one."""
        return self.num_sequences >= other.num_sequences and self.query_len >= other.query_len


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose KV blocks are managed together: `num_blocks`, and one for padding behind them.

    With a `window` a token sees itself and the `window - 1` tokens before it; what is behind is freed.
    """

    num_blocks: int
    window: int | None = None

    @property
    def padding_block(self) -> int:
        """The block behind the last one that sequences may have."""
        return self.num_blocks


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What the scheduler must obey.

    `mixed_steps`: prefill chunks and decodes may share a step. `chunked_prefill`: a prompt may be split over steps. At
    most `max_prefill_seqs` sequences in prefill share a step (None: as many as run). With `shapes` a device runs a step
    padded to one of them, and `max_num_batched_tokens` bounds the padded size. `async_scheduling`: a step that
    `is_async` may be started before the last one is waited for.

    `num_blocks` and `window` are of the first cache group: full attention, or the widest of the windows if no layer
    sees everything. `window_groups` are the groups of the other windows, the widest first.

    Beside its `num_blocks` an executor owns a `padding_block` in each group, which no sequence reads: unused entries of
    block tables name it, and what is computed for padding is written there. Entries behind a window name it too.

    `num_states` are the slots of recurrent state, one for each sequence and the others for snapshots, with one for
    padding behind them; 0: no layer is recurrent. A state can go back behind `max_draft_tokens` of a sequence, so a
    step has no more of them; other models have no such limit. `max_loras` are the different adapters that may share a
    step.

    With `pipeline_stages` above 1, so many steps may be started before the first of them is waited for, none of which
    has a sequence of another. What is written and copied for them happens in the order in which it was asked for.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    mixed_steps: bool = True
    chunked_prefill: bool = True
    max_prefill_seqs: int | None = None
    async_scheduling: bool = False
    shapes: tuple[StepShape, ...] = ()
    window: int | None = None
    window_groups: tuple[CacheGroup, ...] = ()
    num_states: int = 0
    max_draft_tokens: int = 0
    max_loras: int = 0
    pipeline_stages: int = 1

    def __post_init__(self) -> None:
        if 0 < self.num_states < self.max_num_seqs:
            raise ValueError(f"{self.max_num_seqs} sequences need as many states, and there are {self.num_states}")
        if too_large := [s for s in self.shapes if s.num_tokens > self.max_num_batched_tokens]:
            raise ValueError(f"{too_large[0]} is more than the {self.max_num_batched_tokens} tokens of a step")

    @property
    def draft_limit(self) -> int | None:
        """How many draft tokens of a sequence a step may have; None: any number."""
        if self.shapes:
            return 0
        return self.max_draft_tokens if self.num_states else None

    @property
    def padding_block(self) -> int:
        """That of the first group."""
        return self.num_blocks

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """All cache groups."""
        return (CacheGroup(self.num_blocks, self.window), *self.window_groups)

    @property
    def max_context(self) -> int | None:
        """The longest sequence that the cache can hold, in tokens; None if windows make room for any."""
        lengths = [
            group.num_blocks * self.block_size
            for group in self.groups
            if group.window is None
            or not self.chunked_prefill
            or group.num_blocks * self.block_size < group.window - 1 + self.block_size
        ]
        return min(lengths, default=None)

    def padded(self, shape: StepShape) -> StepShape:
        """The smallest of `shapes` that holds a step; the step's own where none does, or none is fixed."""
        fitting = [fixed for fixed in self.shapes if fixed.holds(shape)]
        return min(fitting, key=lambda fixed: (fixed.num_tokens, fixed.query_len), default=shape)


class Pending(Protocol):
    """A step that was started."""

    def wait(self) -> StepOutput:
        """What the step gave, once. Drops the GIL while it waits, or computes."""
        ...


class OnWait:
    """A step that is computed when it is waited for, by devices that have nothing but the caller's processors."""

    def __init__(self, compute: Callable[[], StepOutput]) -> None:
        self.wait = compute


class Executor(Protocol):
    """A loaded model with its KV cache. All calls come from one thread."""

    limits: ExecutorLimits

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compile or capture whatever steps need, before the first one. `progress(done, all)` is called on the way."""
        ...

    def start(self, batch: StepBatch) -> Pending:
        """Begin to run the batch: write its K and V, and sample its rows.

        One step at a time: the next begins when this one was waited for. The batch must stay as it is until then. A
        device with `async_scheduling` has taken what it needs of the batch when this returns, and may be given one step
        that `is_async` before this one is waited for. They are waited for in order.
        """
        ...

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """Copy KV blocks of a cache group, `pairs[i] = (from, to)`, shape [N, 2]. None is copied both from and to."""
        ...

    def yield_core(self, num_tokens: int) -> Callable[[], None] | None:
        """Hear that another thread of this process is about to pass on a step's `num_tokens` tokens.

        Returns what has to be called when that is done, from any thread, also in the middle of a step or after `close`;
        None if the device does not mind.
        """
        ...

    def close(self) -> None:
        """Free weights and cache and stop the device's threads. Calling it twice is allowed.

        Steps may have been started that nobody will wait for.
        """
        ...


@runtime_checkable
class BucketedExecutor(Executor, Protocol):
    """One whose launches are padded to buckets."""

    def stats(self) -> BucketStats:
        """What was run since the warm-up. May be called from any thread."""
        ...


class RecurrentExecutor(Executor, Protocol):
    """One with recurrent layers. A sequence that begins at position 0 begins with the initial state."""

    def copy_states(self, pairs: NDArray[np.int32]) -> None:
        """Copy the state of all layers between slots, `pairs[i] = (from, to)`, shape [N, 2], one after the other."""
        ...


@runtime_checkable
class LoraExecutor(Executor, Protocol):
    """One that adds adapters to what it computes: sequences name them by number (`StepBatch.adapters`)."""

    def load_lora(self, number: int, adapter: LoraAdapter) -> None:
        """Make an adapter ready, from any thread, also in the middle of a step. Raises DeviceError."""
        ...

    def drop_lora(self, number: int) -> None:
        """Free an adapter that no sequence names any more."""
        ...


@runtime_checkable
class ScratchExecutor(Executor, Protocol):
    """One that keeps memory from step to step which it can take anew."""

    def release_scratch(self) -> None:
        """Give that memory back, as no step is expected soon."""
        ...


@runtime_checkable
class RestartingExecutor(Executor, Protocol):
    """One that computes in other processes, and can start them again when one of them ends. The cache is empty then.

    Where they have ended, its methods raise DeviceError. It has to be restarted before it is used again.
    """

    def watch(self, on_end: Callable[[], None]) -> None:
        """Have `on_end` called, on any thread, when a process ends; also before or between steps."""
        ...

    def check(self) -> None:
        """Raise DeviceError if a process has ended."""
        ...

    def restart(self, failure: DeviceError) -> None:
        """End all processes, and start new ones after a pause that grows from time to time.

        Raises `failure` if that has happened too often, and LoadCancelledError after `stop_restarting`.
        """
        ...

    def stop_restarting(self) -> None:
        """End a restart, and let no other begin. From any thread."""
        ...


class DraftExecutor(Protocol):
    """A small model that drafts what the model beside it will sample. That one's executor closes it.

    Its KV cache has the blocks of the other one's first cache group, under the same numbers. Or it is the executor of a
    model with an `mtp` or `eagle3` layer, which drafts in blocks of its own.
    """

    limits: ExecutorLimits

    def draft(self, batch: StepBatch, counts: NDArray[np.int32], least_probability: float = 0.0) -> NDArray[np.int32]:
        """Run the batch, then one draft token after the other: up to `counts` [S] tokens of each sequence, each sampled
        as its row says, at its own position. Returns the draft tokens [S, most], with -1 behind the last one of each
        sequence.

        The rows of the batch are the last tokens of the sequences that want draft tokens. K and V of draft tokens are
        written behind the batch's, but for the last of each sequence, so the block tables must have room for them. A
        greedy sequence gets only draft tokens that are, all together, accepted with `least_probability`, as the model
        thinks. One that draws its tokens gets one more. Penalties count the draft tokens before. Masks are for the
        first draft token alone, and must be written. Reports are left out. Drops the GIL.

        Such a layer is given the last tokens alone. It drafts nothing for a sequence of which it does not know what
        the model left of the token before.
        """
        ...

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        """See Executor."""
        ...


@runtime_checkable
class OffloadingExecutor(Executor, Protocol):
    """One whose KV blocks can be kept elsewhere. It has one cache group, without a window, and no recurrent state.

    A block's `block_bytes` do not depend on how the device shares its work out: another load of the same model, on a
    device that computes the same bits, may be given them.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, over all layers."""
        ...

    def read_blocks(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The bytes of blocks that no step writes now, shape [N, block_bytes]."""
        ...

    def write_blocks(self, blocks: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        """Put such bytes into blocks that no sequence holds, between two steps."""
        ...


class Device(Protocol):
    """Something that can load a spec. `name` is what `--device` calls it.

    With `has_own_memory` weights and cache do not lie in the machine's memory: the device itself sees to it that they
    fit, and sizes a cache that nobody sized (`kv_cache_bytes` None) when the weights are loaded.

    Where it `quantizes`, it stores weights as ExecutorOptions.quantization says; else it is not to be asked for that.
    """

    name: str
    has_own_memory: bool
    quantizes: bool

    @property
    def isa(self) -> str | None:
        """The instruction set level in use, where there is a choice of them."""
        ...

    def default_dtype(self, checkpoint: DType) -> DType:
        """What `--dtype auto` means for a checkpoint stored as `checkpoint`."""
        ...

    def kv_bytes_per_token(self, spec: DecoderSpec, kv_cache_dtype: KvCacheDType) -> int:
        """Bytes of KV cache that one token takes over all layers. Raises DeviceError for a type it cannot cache."""
        ...

    def kv_group_bytes(self, spec: DecoderSpec, kv_cache_dtype: KvCacheDType) -> list[GroupBytes]:
        """The same bytes for each cache group, in the order of `spec.windows()`."""
        ...

    def plan(
        self, spec: DecoderSpec, weights: WeightSource, dtype: DType, quantization: Quantization | None
    ) -> LoadPlan:
        """What `load` will have in memory with ExecutorOptions of this `dtype` and `quantization`.

        Raises DeviceError for what cannot be.
        """
        ...

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
        ...


@runtime_checkable
class LoraDevice(Device, Protocol):
    """One whose executors are LoraExecutors where ExecutorOptions.lora asks for it."""

    @property
    def has_lora(self) -> bool:
        """Whether that is so."""
        ...


@runtime_checkable
class DraftingDevice(Device, Protocol):
    """One that runs a draft model beside another one."""

    def load_draft(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        beside: Executor,
        cancellation: Cancellation | None = None,
    ) -> DraftExecutor:
        """Load a model on the processors of `beside`, an executor of this device, which is idle meanwhile.

        `options` give it as many blocks as the other one's first cache group has. Raises what `load` raises.
        """
        ...


@runtime_checkable
class MtpDevice(Device, Protocol):
    """One whose executors are DraftExecutors where the spec has an `mtp` or `eagle3` layer."""

    @property
    def has_mtp(self) -> bool:
        """Whether that is so."""
        ...


@runtime_checkable
class StagedDevice(Device, Protocol):
    """One that can have some layers of a model in a process of their own."""

    def limits(self, spec: DecoderSpec, options: ExecutorOptions) -> ExecutorLimits:
        """Those of the whole model, which all stages have. Raises DeviceError if the cache is too small."""
        ...

    def stage_groups(self, num_stages: int) -> list[list[list[int]]]:
        """The processors of each stage, by group. Raises DeviceError if they cannot be shared out."""
        ...

    def groups_of(self, cpus: Sequence[int]) -> list[list[int]]:
        """These processors in as many groups as a stage has. Raises DeviceError if they cannot be shared out."""
        ...

    def bound_to(self, groups: Sequence[Sequence[int]]) -> StagedDevice:
        """The device on these groups of processors alone."""
        ...

    def load_stage(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        options: ExecutorOptions,
        stage: StageSpec,
        cancellation: Cancellation | None = None,
    ) -> Executor:
        """Load the layers of a stage. `weights` have theirs alone; `spec` and `options` are the model's."""
        ...


@runtime_checkable
class RewindingDevice(Device, Protocol):
    """One whose recurrent state can go back behind rejected draft tokens."""

    def max_draft_tokens(self, spec: DecoderSpec) -> int:
        """How many draft tokens of a sequence a step may have; 0 for a spec without recurrent layers."""
        ...

    def slot_bytes(self, spec: DecoderSpec) -> int:
        """Bytes of a sequence's state, with what it takes to go back."""
        ...


@runtime_checkable
class OffloadingDevice(Device, Protocol):
    """One whose executors are OffloadingExecutors for models that have full attention alone."""

    def kv_version(self) -> str:
        """Changes whenever the same weights and tokens may give other bits of K and V. May read a file."""
        ...
