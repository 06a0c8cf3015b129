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
        self,
        name: str,
        data: NDArray[np.uint8],
        type: str,
        row_order: NDArray[np.int32] | None,
        mapped: bool,
        scales_at: Sequence[tuple[int, int]] = (),
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
    kind: Literal["rms", "layer"]
    eps: float
    bias: bool
    weight: bool
    unit_offset: bool

class RopePlan(_Plan):
    inv_freq: Sequence[float]
    factor: float
    interleaved: bool
    axes: Sequence[int]

class TemperaturePlan(_Plan):
    beta: float
    length: int
    offset: int

class KvScales(_Plan):
    k: float
    v: float

class DisentangledPlan(_Plan):
    num_rows: int
    rows: Sequence[int]
    content_to_position: bool
    position_to_content: bool

class AttentionPlan(_Plan):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool
    out_bias: bool
    qk_norm: NormPlan | None
    qk_norm_over: Literal["head", "each", "whole"]
    qk_norm_after_rope: bool
    rope: RopePlan | None
    sliding_window: int
    cache_group: int
    softcap: float
    alibi_slopes: Sequence[float]
    bias_span: int
    sinks: bool
    output_gate: bool
    query_temperature: TemperaturePlan | None
    v_norm: NormPlan | None
    values_from_keys: bool
    shared_layer: int
    kv_scales: KvScales
    two_way: bool
    clipped: bool
    disentangled: DisentangledPlan | None

class LatentAttentionPlan(_Plan):
    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    kv_rank: int
    q_rank: int
    scale: float
    bias: bool
    norm: NormPlan
    rope: RopePlan
    cache_group: int
    kv_scale: float

class MlpPlan(_Plan):
    intermediate_size: int
    activation: Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"]
    gated: bool
    bias: bool
    down_bias: bool
    gate_scale: float
    cutoff: float | None
    clipped: bool

class DeltaNetPlan(_Plan):
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm: NormPlan
    tiled: bool

class Mamba2Plan(_Plan):
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_kernel: int
    norm: NormPlan | None
    norm_groups: int
    gate_first: bool
    min_dt: float
    max_dt: float
    conv_bias: bool
    bias: bool
    input_scales: Sequence[float]

class ShortConvPlan(_Plan):
    size: int
    conv_kernel: int
    bias: bool

class RouterPlan(_Plan):
    sigmoid: bool
    normalize: bool
    bias: bool
    correction_bias: bool
    num_groups: int
    kept_groups: int
    best_two: bool
    scale: float
    expert_scales: bool
    sparse_mixer: bool
    jitter: float

class ExpertsPlan(_Plan):
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    activation: Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"]
    bias: bool
    swiglu_limit: float
    weighs_input: bool
    router: RouterPlan
    shared_size: int
    shared_activation: Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"]
    shared_gate: bool
    gated: bool
    unpacked: bool
    input_norm: NormPlan | None
    router_norm: NormPlan | None
    router_input_scale: float
    sum_bias: bool

class ParallelPlan(_Plan):
    residuals: Sequence[ResidualBlockPlan]

class PerLayerPlan(_Plan):
    layer: int
    size: int
    activation: Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"]

class LaurelPlan(_Plan):
    rank: int
    norm: NormPlan

class AltUpPlan(_Plan):
    streams: int
    active: int
    norm: NormPlan
    residuals: Sequence[ResidualBlockPlan]
    passive: Sequence[ResidualBlockPlan]
    scaled: bool

class StreamsPlan(_Plan):
    count: int
    min_square: float

class ResidualBlockPlan(_Plan):
    mixer: MixerPlan
    norm: NormPlan | None
    post_norm: NormPlan | None
    sum_norm: NormPlan | None
    scale: float
    sum_scale: bool
    sum_factor: float

class PerLayerEmbeddingPlan(_Plan):
    vocab_size: int
    size: int
    scale: float
    projection_scale: float
    sum_scale: float
    norm: NormPlan

class EmbeddingPlan(_Plan):
    size: int
    num_positions: int
    position_offset: int
    scale: float
    norm: NormPlan | None
    per_layer: PerLayerEmbeddingPlan | None

class HeadPlan(_Plan):
    tied: bool
    divisor: float
    softcap: float
    bias: bool

class MtpPlan(_Plan):
    embedding_norm: NormPlan
    hidden_norm: NormPlan
    layer: Sequence[ResidualBlockPlan]
    final_norm: NormPlan
    feeds_normed: bool
    num_draft_tokens: int

class Eagle3Plan(_Plan):
    hidden_size: int
    vocab_size: int
    layers: Sequence[int]
    embedding_norm: NormPlan
    hidden_norm: NormPlan
    attention: AttentionPlan
    mlp: ResidualBlockPlan
    final_norm: NormPlan
    own_embedding: bool
    adds_normed: bool
    token_ids: Sequence[int]
    num_draft_tokens: int

class DecoderPlan(_Plan):
    vocab_size: int
    hidden_size: int
    max_positions: int
    embeds: bool
    has_head: bool
    embedding: EmbeddingPlan
    layers: Sequence[Sequence[ResidualBlockPlan]]
    final_norm: NormPlan | None
    head: HeadPlan
    streams: StreamsPlan | None
    mtp: MtpPlan | None
    eagle3: Eagle3Plan | None
    formats: Mapping[str, WeightFormat]
    input_orders: Mapping[str, Sequence[int]]

class ProjectionPlan(_Plan):
    inputs: int
    outputs: int
    bias: bool
    norm: NormPlan | None
    activates: bool
    activation: Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"]

class CrossAttentionPlan(_Plan):
    num_heads: int
    head_dim: int
    scale: float

class TowerPlan(_Plan):
    hidden_size: int
    layers: Sequence[Sequence[ResidualBlockPlan]]
    projections: Mapping[str, ProjectionPlan]
    cross_attentions: Mapping[str, CrossAttentionPlan]
    formats: Mapping[str, WeightFormat]
    input_orders: Mapping[str, Sequence[int]]

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

class ThreadPool:
    cpus: list[list[int]]
    def __init__(self, groups: Sequence[Sequence[int]]) -> None: ...
    def yield_core(self) -> None: ...
    def reclaim_core(self) -> None: ...

class Executor:
    isa: str
    threads: ThreadPool
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
    ) -> bool: ...
    def stop_loading(self) -> None: ...
    def check_complete(self) -> None: ...
    def read_weights(self, file: int, offset: int, checksum: int) -> bool: ...
    def weights_checksum(self) -> int: ...
    def packed_weights(self) -> list[NDArray[np.uint8]]: ...
    @property
    def vocab_size(self) -> int: ...
    def step(
        self,
        batch: StepBatch,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32] | None,
        ranks: NDArray[np.int32] | None,
        top_ids: NDArray[np.int32] | None,
        top_logprobs: NDArray[np.float32] | None,
        rows: NDArray[np.float32] | None = None,
        logits: NDArray[np.float32] | None = None,
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
    def use_threads(self, threads: ThreadPool) -> bool: ...
    def matrix_ids(self, names: Sequence[str]) -> list[int]: ...
    def capture_inputs(self, names: Sequence[str]) -> None: ...
    def take_inputs(self, name: str) -> NDArray[np.float32]: ...
    def start_profile(self) -> None: ...
    def stop_profile(self) -> None: ...
    def profile(self) -> dict[str, tuple[int, float]]: ...

class Tower:
    isa: str
    num_blocks: int
    weight_bytes: int
    scratch_bytes: int
    def __init__(
        self,
        plan: TowerPlan,
        isa: str,
        cache_dtype: str,
        max_rows: int,
        piece_rows: int,
        beside: Executor | None,
        groups: Sequence[Sequence[int]] = (),
        max_lora_rank: int = 0,
    ) -> None: ...
    def set_weights(
        self,
        tensors: Sequence[tuple[str, NDArray[np.generic], str, bool, bool]],
        matrices: Sequence[BlockSource] = (),
    ) -> bool: ...
    def stop_loading(self) -> None: ...
    def use_threads(self, threads: ThreadPool) -> bool: ...
    def check_complete(self) -> None: ...
    def read_weights(self, file: int, offset: int, checksum: int) -> bool: ...
    def weights_checksum(self) -> int: ...
    def packed_weights(self) -> list[NDArray[np.uint8]]: ...
    def project(self, name: str, rows: NDArray[np.float32], out: NDArray[np.float32]) -> None: ...
    def remember(
        self,
        layer: int,
        rows: NDArray[np.float32],
        query_start: NDArray[np.int32],
        lengths: NDArray[np.int32],
        first: int,
        positions: NDArray[np.int32] | None,
        seen: NDArray[np.int32] | None = None,
        adapters: NDArray[np.int32] | None = None,
    ) -> None: ...
    def run(
        self,
        layer: int,
        end: int,
        rows: NDArray[np.float32],
        query_start: NDArray[np.int32],
        lengths: NDArray[np.int32],
        positions: NDArray[np.int32] | None,
        seen: NDArray[np.int32] | None = None,
        adapters: NDArray[np.int32] | None = None,
        read: NDArray[np.int32] | None = None,
    ) -> None: ...
    def finish(
        self,
        layer: int,
        rows: NDArray[np.float32],
        query_start: NDArray[np.int32],
        lengths: NDArray[np.int32],
        first: int,
        positions: NDArray[np.int32] | None,
        seen: NDArray[np.int32] | None = None,
        adapters: NDArray[np.int32] | None = None,
    ) -> None: ...
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
    ) -> Adapter: ...
    def set_adapter(self, number: int, adapter: Adapter | None) -> None: ...
    def remember_keys(self, name: str, rows: NDArray[np.float32], length: int, first: int) -> None: ...
    def attend(self, name: str, rows: NDArray[np.float32], length: int, out: NDArray[np.float32]) -> None: ...
    def release_scratch(self) -> None: ...

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
def normalize(
    isa: str,
    rows: NDArray[np.float32],
    epsilon: float,
    weight: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
) -> None: ...
def quantize(
    kind: str,
    rows: NDArray[np.generic],
    dtype: str = "float32",
    importance: NDArray[np.float32] | None = None,
    threads: int = 1,
    thorough: bool = False,
    isa: str = "auto",
) -> NDArray[np.uint8]: ...
def search_grid(
    rows: NDArray[np.float32],
    importance: NDArray[np.float32],
    bits: int,
    symmetric: bool,
    scale_type: str,
    scales: NDArray[np.float32],
    zeros: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    errors: NDArray[np.float64],
    squares: NDArray[np.float64],
    threads: int = 1,
    isa: str = "auto",
) -> None: ...
def round_inputs(
    x: NDArray[np.float32],
    originals: NDArray[np.float32],
    factor: NDArray[np.float32],
    groups: NDArray[np.int32],
    scales: NDArray[np.float32],
    zeros: NDArray[np.float32],
    bits: int,
    codes: NDArray[np.uint8],
    residuals: NDArray[np.float64],
    threads: int = 1,
    isa: str = "auto",
) -> None: ...
def string_ends(content: NDArray[np.uint8], begin: int, ends: NDArray[np.uint64]) -> bool: ...
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
