"""Types of the native extension; `native/bindings.cpp` says what each does."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import dataclass_transform

from tidewheel.engine.devices.batch import SamplingBatch, StepBatch

class Processor(TypedDict):
    cpu: int
    core: int
    numa_node: int

class Topology(TypedDict):
    processors: list[Processor]
    cores: list[int]

class StoppedError(Exception): ...

class WeightFormat:
    def __init__(
        self,
        kind: str,
        group: int = 32,
        zero_points: bool = False,
        bits: int = 4,
        scale_type: str = "float16",
        table: Sequence[float] = (),
        scale_table: Sequence[float] = (),
        scale_run: int = 0,
    ) -> None: ...

class BlockSource:
    @overload
    def __init__(
        self, name: str, data: NDArray[np.uint8], type: str, row_order: NDArray[np.int32] | None, mapped: bool
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        codes: NDArray[np.uint8],
        bits: int,
        group: int,
        inputs: int,
        scales: NDArray[np.generic],
        scale_type: str,
        zeros: NDArray[np.uint8] | None,
        twos_complement: bool,
    ) -> None: ...
    @overload
    def __init__(
        self,
        name: str,
        codes: NDArray[np.uint8],
        type: str,
        group: int,
        inputs: int,
        scales: NDArray[np.generic],
        numbers: NDArray[np.float32] | None,
        scale_table: Sequence[float],
        largest: NDArray[np.float32] | None,
        offsets: NDArray[np.float32] | None,
        mapped: bool,
    ) -> None: ...

# To type checkers a plan is a dataclass, so that a field is written once. There is no such class at run time.
@dataclass_transform(kw_only_default=True, frozen_default=True)
class _Plan: ...

# Plans, by tools/native_stub.py:

class NormPlan(_Plan):
    kind: Literal["rms", "layer"] = "rms"
    eps: float = 0.0
    bias: bool = False
    weight: bool = True
    unit_offset: bool = False

class RopePlan(_Plan):
    inv_freq: Sequence[float] = ...
    factor: float = 1.0
    interleaved: bool = False

class TemperaturePlan(_Plan):
    beta: float = 0.0
    length: int = 1
    offset: int = 0

class KvScales(_Plan):
    k: float = 1.0
    v: float = 1.0

class AttentionPlan(_Plan):
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    scale: float = 0.0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormPlan | None = None
    qk_norm_over: Literal["head", "each", "whole"] = "head"
    qk_norm_after_rope: bool = False
    rope: RopePlan | None = None
    sliding_window: int = 0
    cache_group: int = 0
    softcap: float = 0.0
    alibi_slopes: Sequence[float] = ...
    sinks: bool = False
    output_gate: bool = False
    query_temperature: TemperaturePlan | None = None
    v_norm: NormPlan | None = None
    values_from_keys: bool = False
    shared_layer: int = -1
    kv_scales: KvScales = ...

class LatentAttentionPlan(_Plan):
    num_heads: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    kv_rank: int = 0
    q_rank: int = 0
    scale: float = 0.0
    bias: bool = False
    norm: NormPlan = ...
    rope: RopePlan = ...
    cache_group: int = 0
    kv_scale: float = 1.0

class MlpPlan(_Plan):
    intermediate_size: int = 0
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    gated: bool = False
    bias: bool = False
    gate_scale: float = 1.0
    cutoff: float | None = None

class DeltaNetPlan(_Plan):
    num_key_heads: int = 0
    num_value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    conv_kernel: int = 0
    norm: NormPlan = ...
    tiled: bool = False

class Mamba2Plan(_Plan):
    num_heads: int = 0
    head_dim: int = 0
    num_groups: int = 0
    state_dim: int = 0
    conv_kernel: int = 0
    norm: NormPlan | None = None
    norm_groups: int = 1
    gate_first: bool = True
    min_dt: float = 0.0
    max_dt: float = 0.0
    conv_bias: bool = False
    bias: bool = False
    input_scales: Sequence[float] = ...

class ShortConvPlan(_Plan):
    size: int = 0
    conv_kernel: int = 0
    bias: bool = False

class RouterPlan(_Plan):
    sigmoid: bool = False
    normalize: bool = True
    bias: bool = False
    correction_bias: bool = False
    num_groups: int = 1
    kept_groups: int = 1
    best_two: bool = False
    scale: float = 1.0
    expert_scales: bool = False
    sparse_mixer: bool = False
    jitter: float = 0.0

class ExpertsPlan(_Plan):
    num_experts: int = 0
    experts_per_token: int = 0
    intermediate_size: int = 0
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    bias: bool = False
    swiglu_limit: float = 0.0
    weighs_input: bool = False
    router: RouterPlan = ...
    shared_size: int = 0
    shared_activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    shared_gate: bool = False
    gated: bool = True
    unpacked: bool = False
    input_norm: NormPlan | None = None
    router_norm: NormPlan | None = None
    router_input_scale: float = 1.0

class ParallelPlan(_Plan):
    residuals: Sequence[ResidualBlockPlan] = ...

class PerLayerPlan(_Plan):
    layer: int = 0
    size: int = 0
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "gelu_tanh"

class LaurelPlan(_Plan):
    rank: int = 0
    norm: NormPlan = ...

class AltUpPlan(_Plan):
    streams: int = 0
    active: int = 0
    norm: NormPlan = ...
    residuals: Sequence[ResidualBlockPlan] = ...
    passive: Sequence[ResidualBlockPlan] = ...
    scaled: bool = True

class StreamsPlan(_Plan):
    count: int = 0
    min_square: float = 0.0

class ResidualBlockPlan(_Plan):
    mixer: MixerPlan = ...
    norm: NormPlan | None = None
    post_norm: NormPlan | None = None
    sum_norm: NormPlan | None = None
    scale: float = 1.0
    sum_scale: bool = False
    sum_factor: float = 1.0

class PerLayerEmbeddingPlan(_Plan):
    vocab_size: int = 0
    size: int = 0
    scale: float = 1.0
    projection_scale: float = 1.0
    sum_scale: float = 1.0
    norm: NormPlan = ...

class EmbeddingPlan(_Plan):
    size: int = 0
    num_positions: int = 0
    position_offset: int = 0
    scale: float = 1.0
    norm: NormPlan | None = None
    per_layer: PerLayerEmbeddingPlan | None = None

class HeadPlan(_Plan):
    tied: bool = False
    divisor: float = 1.0
    softcap: float = 0.0
    bias: bool = False

class MtpPlan(_Plan):
    embedding_norm: NormPlan = ...
    hidden_norm: NormPlan = ...
    layer: Sequence[ResidualBlockPlan] = ...
    final_norm: NormPlan = ...
    feeds_normed: bool = True
    num_draft_tokens: int = 0

class Eagle3Plan(_Plan):
    hidden_size: int = 0
    vocab_size: int = 0
    layers: Sequence[int] = ...
    embedding_norm: NormPlan = ...
    hidden_norm: NormPlan = ...
    attention: AttentionPlan = ...
    mlp: ResidualBlockPlan = ...
    final_norm: NormPlan = ...
    own_embedding: bool = False
    adds_normed: bool = False
    token_ids: Sequence[int] = ...
    num_draft_tokens: int = 0

class DecoderPlan(_Plan):
    vocab_size: int = 0
    hidden_size: int = 0
    max_positions: int = 0
    embeds: bool = True
    has_head: bool = True
    embedding: EmbeddingPlan = ...
    layers: Sequence[Sequence[ResidualBlockPlan]] = ...
    final_norm: NormPlan | None = None
    head: HeadPlan = ...
    streams: StreamsPlan | None = None
    mtp: MtpPlan | None = None
    eagle3: Eagle3Plan | None = None
    formats: Mapping[str, WeightFormat] = ...
    input_orders: Mapping[str, Sequence[int]] = ...

MixerPlan: TypeAlias = (
    AttentionPlan
    | MlpPlan
    | ExpertsPlan
    | ParallelPlan
    | DeltaNetPlan
    | Mamba2Plan
    | ShortConvPlan
    | PerLayerPlan
    | LatentAttentionPlan
    | LaurelPlan
    | AltUpPlan
)

# End of the plans.

class Adapter:
    num_bytes: int

class Executor:
    isa: str
    num_threads: int
    weight_bytes: int
    cache_bytes: int
    block_bytes: int
    row_floats: int
    has_states: bool
    def __init__(
        self,
        plan: DecoderPlan,
        isa: str,
        cache_dtype: str,
        num_blocks: Sequence[int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        groups: Sequence[Sequence[int]],
        num_states: int = 0,
        max_lora_rank: int = 0,
        max_draft_tokens: int = 0,
        beside: Executor | None = None,
    ) -> None: ...
    def set_weights(
        self,
        tensors: Sequence[tuple[str, NDArray[np.generic], str, bool, bool]],
        matrices: Sequence[BlockSource] = (),
    ) -> None: ...
    def stop_loading(self) -> None: ...
    def check_complete(self) -> None: ...
    def read_weights(self, file: int, offset: int, checksum: int) -> bool: ...
    def weights_checksum(self) -> int: ...
    def packed_weights(self) -> list[NDArray[np.uint8]]: ...
    def step(
        self,
        batch: StepBatch,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32] | None,
        ranks: NDArray[np.int32] | None,
        top_ids: NDArray[np.int32] | None,
        top_logprobs: NDArray[np.float32] | None,
        logits: NDArray[np.float32] | None,
        rows: NDArray[np.float32] | None = None,
    ) -> None: ...
    def draft(
        self, batch: StepBatch, counts: NDArray[np.int32], min_probability: float, token_ids: NDArray[np.int32]
    ) -> None: ...
    def copy_blocks(self, pairs: NDArray[np.int32], group: int) -> None: ...
    def read_blocks(self, blocks: NDArray[np.int32], to: NDArray[np.uint8]) -> None: ...
    def write_blocks(self, blocks: NDArray[np.int32], source: NDArray[np.uint8]) -> None: ...
    def copy_states(self, pairs: NDArray[np.int32]) -> None: ...
    def release_scratch(self) -> None: ...
    def pack_adapter(
        self,
        dtype: str,
        updates: Sequence[
            tuple[
                str,
                int,
                NDArray[np.float32],
                NDArray[np.float32],
                NDArray[np.float32] | None,
                float,
                NDArray[np.float32] | None,
            ]
        ],
        embed: tuple[NDArray[Any], str] | None = None,
        head: tuple[NDArray[Any], str] | None = None,
        rope_factor: float = 1.0,
    ) -> Adapter: ...
    def set_adapter(self, number: int, adapter: Adapter | None) -> None: ...
    def pin_caller(self) -> None: ...
    def yield_core(self) -> None: ...
    def reclaim_core(self) -> None: ...
    def start_profile(self) -> None: ...
    def stop_profile(self) -> None: ...
    def profile(self) -> dict[str, tuple[int, float]]: ...

def sample(
    isa: str,
    logits: NDArray[np.float32],
    sampling: SamplingBatch,
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32] | None,
    ranks: NDArray[np.int32] | None,
    top_ids: NDArray[np.int32] | None,
    top_logprobs: NDArray[np.float32] | None,
) -> None: ...
def available_isa_levels() -> list[str]: ...
def isa_note() -> str: ...
def chosen_isa_level(isa: str = "auto") -> str: ...
def topology(root: str = "/", allowed: Sequence[int] | None = None) -> Topology: ...
def parse_cpu_list(text: str) -> list[int]: ...
def packed_version() -> int: ...
def plan_fields() -> dict[str, dict[str, str]]: ...
def block_tokens() -> int: ...
def state_floats(key_dim: int, value_dim: int) -> int: ...
def kv_bytes_per_block(num_kv_heads: int, key_dim: int, value_dim: int, values_in_keys: bool, dtype: str) -> int: ...
def measure_ceilings(isa: str, cpus: Sequence[int], seconds: float = 1.0, megabytes: int = 512) -> dict[str, float]: ...
