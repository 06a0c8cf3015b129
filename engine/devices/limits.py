"""What a device is asked to provide, and the limits that the scheduler must keep to."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ..declaring.record import record
from ..weights.dtypes import DType, KvCacheDType
from ..weights.kv_scales import KvScales
from ..weights.quantization import Quantization
from .cache_split import CacheSplit, GroupBytes, StateSplit, blocks_without_kv, keeps_kv


class LoraLimits(Struct, frozen=True):
    """Which adapters there may be: at most `max_loras` in one step, with ranks up to `max_rank`, kept as `dtype`.

    `of_experts`: they may change routed experts. A device of fixed shapes has room for that only then.
    """

    max_loras: int
    max_rank: int
    dtype: DType
    of_experts: bool = True


@record(frozen=True, slots=True)
class ExecutorOptions:
    """What any device is asked to provide. `max_model_len` is in tokens.

    `dtype` is the weights' type, `kv_cache_dtype` that of cached K and V. `kv_cache_bytes` bounds the KV cache; it is
    None only for a device with memory of its own, which then finds out what the weights leave. If `num_blocks` is
    given, the first cache group has that many blocks, whatever `kv_cache_bytes` says.
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
        """The limits of a device that has none of its own. Raises DeviceError if the cache is too small.

        `kv_cache_bytes` is what the device has found that it can spend; None: the options'. `state_bytes` is the size
        of a slot for the recurrent state of one sequence, with what it takes to go back behind `max_draft_tokens`. The
        slots are a part of the cache.
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


@record(frozen=True, slots=True)
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


@record(frozen=True, slots=True)
class ExecutorLimits:
    """The limits that the scheduler must keep to.

    `mixed_steps`: prefill chunks and decodes may share a step. `chunked_prefill`: a prompt may be split over steps. At
    most `max_prefill_seqs` sequences in prefill share a step (None: as many as run). With `shapes` a device runs a step
    padded to one of them, and `max_num_batched_tokens` bounds the padded size. `async_scheduling`: a step that
    `is_async` may be started before the last one is waited for.

    `num_blocks` and `window` belong to the first cache group: full attention, or the widest of the windows if no layer
    sees everything. `window_groups` are the groups of the other windows, the widest first.

    In addition to its `num_blocks`, an executor has a `padding_block` in each group, which no sequence reads. Unused
    entries of block tables name it, and so do entries behind a window. What is computed for padding is written there.

    `num_states` counts the slots of recurrent state, one for each sequence and the others for snapshots, without the
    slot for padding behind them; 0: no layer is recurrent. A state can go back behind `max_draft_tokens` of a sequence,
    so a step has no more of them; other models have no such limit. `max_loras` is how many different adapters may share
    a step.

    With `pipeline_stages` above 1, up to `pipeline_stages` steps may be started before the first of them is waited for.
    They have no sequence in common. Writes and copies for them happen in the order in which they were asked for.
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
        """The padding block of the first group."""
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
