"""A DecoderSpec as the native runtime's plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from typing import TypeAlias

from tidewheel import _native

from ...errors import DeviceError
from ...models.spec import (
    AltUpSpec,
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    Eagle3Spec,
    ExpertsSpec,
    LatentAttentionSpec,
    LaurelSpec,
    Mamba2Spec,
    MixerSpec,
    MlpSpec,
    NormSpec,
    ParallelSpec,
    PerLayerEmbeddingSpec,
    PerLayerSpec,
    ResidualBlockSpec,
    RopeSpec,
    ShortConvSpec,
    StageSpec,
    mixers,
    stage_tensors,
    tensor_shapes,
)
from ...weights.dtypes import DType
from ...weights.kv_scales import KvScale, KvScales
from ...weights.quantization import GROUP_SIZES, Quantization, TensorFormat, format_of, is_router
from ...weights.tensor import WeightSource

Formats: TypeAlias = Mapping[str, TensorFormat]

_CHUNK = 256  # inputs that a kernel expands at once
_PIECE = 128  # of small floats
_EXPERT = re.compile(r"(.+\.(?:experts\.\d+|shared))\.(gate|up)\.weight")
_LOOKED_UP = ("embed.weight", "embed.positions", "embed.per_layer")


def formats_of(
    spec: DecoderSpec, dtype: DType, quantization: Quantization | None, weights: WeightSource | None = None
) -> Formats:
    """The formats of all matrices, by the names of their tensors.

    Without a quantization, what is quantized in `weights` keeps its format where the kernels have it.
    """
    formats: dict[str, TensorFormat] = {}
    for name, shape in tensor_shapes(spec).items():
        if len(shape) == 2:
            stored = None if weights is None or quantization is not None else weights.stored_format(name)
            if stored is not None and why_not_kept(name, shape, stored) is not None:
                stored = None
            formats[name] = format_of(name, shape, dtype, quantization, stored)
    for name, format in list(formats.items()):
        pair = interleaved_with(name)
        if pair is not None and formats.get(pair, format) != format:
            formats[name] = formats[pair] = TensorFormat(dtype)
    return formats


def interleaved_with(name: str) -> str | None:
    """The weight that is packed into one matrix with an expert's gate or up, so that both must have one format."""
    found = _EXPERT.fullmatch(name)
    return None if found is None else f"{found[1]}.{'up' if found[2] == 'gate' else 'gate'}.weight"


def why_not_kept(name: str, shape: tuple[int, ...], stored: TensorFormat) -> str | None:
    """In words, why the kernels cannot compute with a quantized matrix as it is stored; None: they can."""
    if is_router(name):
        return "routers are kept in float32"
    if stored.input_order is not None and name in _LOOKED_UP:
        return "the inputs of an embedding cannot have an order of their own"
    small = stored.is_small_floats and stored.kind != "nvfp4"
    if small and small_float_group(stored.group_size, shape[1]) is None:
        return f"their groups are of 32, 64 or a multiple of 128 inputs, or whole rows, not of {stored.group_size}"
    if stored.kind == "grid" and grid_group(stored.group_size, shape[1]) is None:
        return f"groups are of 32, 64, 128 or a multiple of 256 inputs, or whole rows, not of {stored.group_size}"
    return None


def grid_group(group_size: int, inputs: int) -> int | None:
    """How many of the inputs share a scale as the kernels count; None if they have no such groups."""
    if group_size in GROUP_SIZES or group_size % _CHUNK == 0:
        return group_size
    return -(-inputs // _CHUNK) * _CHUNK if group_size >= inputs else None


def small_float_group(group_size: int, inputs: int) -> int | None:
    """The same of floats of 8 bits, and of 4 bits by a table."""
    if group_size in (32, 64) or group_size % _PIECE == 0:
        return group_size
    return -(-inputs // _PIECE) * _PIECE if group_size >= inputs else None


def lower(
    spec: DecoderSpec,
    formats: Formats,
    max_positions: int,
    *,
    unpacked_experts: bool = False,
    layer_draft_tokens: int = 0,
    kv_scales: KvScales | None = None,
    stage: StageSpec | None = None,
) -> _native.DecoderPlan:
    """The plan of a model that serves contexts of `max_positions` tokens, with routed experts packed or as they lie.

    A layer that predicts tokens makes drafts of at most `layer_draft_tokens`. With a `stage` it is the plan of its
    layers alone. Raises DeviceError for a kind of mixer that the CPU device does not have, and ValueError for an
    unknown format.
    """
    plan = _native.DecoderPlan()
    plan.vocab_size, plan.hidden_size, plan.max_positions = spec.vocab_size, spec.hidden_size, max_positions
    embedding, head = spec.embedding, spec.head
    plan.embedding = _native.EmbeddingPlan(
        embedding.size,
        embedding.num_positions,
        embedding.position_offset,
        embedding.scale,
        _norm(embedding.norm),
        _per_layer(embedding.per_layer),
    )
    stage = stage or StageSpec(0, len(spec.layers), len(spec.layers))
    plan.embeds, plan.has_head = stage.is_first, stage.is_last
    context = _LayerContext(spec, stage, unpacked_experts, kv_scales)
    plan.layers = [
        [
            _residual(residual, context.of_layer(index))
            for residual in (layer if stage.begin <= index < stage.end else ())
        ]
        for index, layer in enumerate(spec.layers)
    ]
    plan.final_norm = _norm(spec.final_norm)
    if (mtp := spec.mtp) is not None and stage.is_last:
        plan.mtp = _native.MtpPlan(
            _norm_plan(mtp.embedding_norm),
            _norm_plan(mtp.hidden_norm),
            [_residual(residual, context) for residual in mtp.layer],
            _norm_plan(mtp.final_norm),
            mtp.feeds_normed,
            layer_draft_tokens,
        )
    if spec.eagle3 is not None:
        plan.eagle3 = _eagle3(spec.eagle3, context.unscaled(), layer_draft_tokens)
    if spec.streams is not None:
        plan.streams = _native.StreamsPlan(spec.streams.count, spec.streams.min_square)
    plan.head = _native.HeadPlan(head.tied, head.divisor, head.softcap or 0.0, head.bias)
    shapes = tensor_shapes(spec)
    own = {name: formats[name] for name in stage_tensors(spec, stage) if name in formats}
    plan.formats = {name: _format(format, shapes[name][1]) for name, format in own.items()}
    plan.input_orders = {
        name: format.input_order.indices.tolist() for name, format in own.items() if format.input_order is not None
    }
    return plan


def _format(format: TensorFormat, inputs: int) -> _native.WeightFormat:
    if format.kind == "e4m3" or format.kind == "table4":
        group = small_float_group(format.group_size, inputs)
        if group is None:
            raise ValueError(f"there are no kernels for {format}")
        table, scales = list(format.table or ()), list(format.scale_table or ())
        return _native.WeightFormat(format.kind, group, table=table, scale_table=scales, scale_run=format.scale_run)
    if format.kind != "grid":
        return _native.WeightFormat(format.kind, format.group_size, format.zero_points)
    group = grid_group(format.group_size, inputs)
    if group is None:
        raise ValueError(f"there are no kernels for {format}")
    return _native.WeightFormat("grid", group, format.zero_points, format.bits, format.scales)


class _LayerContext:
    """What a mixer cannot tell itself: whether experts are packed, and where each layer's K and V lie: in which cache
    group, and as the how-manyeth layer of the stage in it, and by what they are divided there.
    """

    def __init__(self, spec: DecoderSpec, stage: StageSpec, unpacked_experts: bool, kv_scales: KvScales | None) -> None:
        self.unpacked_experts = unpacked_experts
        self._kv_scales, self._index = kv_scales, 0
        self._windows = spec.windows()
        self._layers: dict[int, int] = {}
        counts = dict.fromkeys(self._windows, 0)
        for index in range(stage.begin, stage.end):
            for mixer in mixers(spec.layers[index]):
                if isinstance(mixer, AttentionSpec | LatentAttentionSpec) and mixer.cached is not None:
                    self._layers[index] = counts[mixer.cached.window]
                    counts[mixer.cached.window] += 1

    def unscaled(self) -> _LayerContext:
        """Those of a layer whose K and V are divided by nothing."""
        own = copy(self)
        own._kv_scales = None
        return own

    def group(self, window: int | None) -> int:
        """The cache group of a window."""
        return self._windows.index(window)

    def of_layer(self, index: int) -> _LayerContext:
        """The surroundings of the mixers of that layer."""
        own = copy(self)
        own._index = index
        return own

    def kv_scale(self, kv_layer: int | None) -> KvScale:
        """That of this layer's K and V, or of `kv_layer`, whose K and V it reads."""
        return KvScale() if self._kv_scales is None else self._kv_scales[self._index if kv_layer is None else kv_layer]

    def layer(self, index: int | None) -> int:
        """Which layer of its cache group a layer of the model is; -1 for None."""
        return -1 if index is None else self._layers[index]


def _residual(residual: ResidualBlockSpec, context: _LayerContext) -> _native.ResidualBlockPlan:
    return _native.ResidualBlockPlan(
        _mixer(residual.mixer, context),
        _norm(residual.norm),
        _norm(residual.post_norm),
        _norm(residual.sum_norm),
        residual.scale,
        residual.sum_scale,
        residual.sum_factor,
    )


def _mixer(mixer: MixerSpec, context: _LayerContext) -> _native.MixerPlan:
    match mixer:
        case AttentionSpec():
            return _attention(mixer, context)
        case LatentAttentionSpec():
            return _latent_attention(mixer, context)
        case MlpSpec():
            return _mlp(mixer)
        case LaurelSpec():
            return _native.LaurelPlan(mixer.rank, _norm_plan(mixer.norm))
        case AltUpSpec():
            return _alt_up(mixer, context)
        case DeltaNetSpec():
            return _delta_net(mixer)
        case Mamba2Spec():
            return _mamba2(mixer)
        case ShortConvSpec():
            return _native.ShortConvPlan(mixer.size, mixer.conv_kernel, mixer.bias)
        case ExpertsSpec():
            return _experts(mixer, context.unpacked_experts)
        case ParallelSpec():
            return _native.ParallelPlan([_residual(residual, context) for residual in mixer.residuals])
        case PerLayerSpec():
            return _native.PerLayerPlan(mixer.layer, mixer.size, mixer.activation)
        case _:
            raise DeviceError(f"the cpu device has no {mixer.kind}")


def _per_layer(per_layer: PerLayerEmbeddingSpec | None) -> _native.PerLayerEmbeddingPlan | None:
    if per_layer is None:
        return None
    return _native.PerLayerEmbeddingPlan(
        per_layer.vocab_size,
        per_layer.size,
        per_layer.scale,
        per_layer.projection_scale,
        per_layer.sum_scale,
        _norm_plan(per_layer.norm),
    )


def _attention(attention: AttentionSpec, context: _LayerContext) -> _native.AttentionPlan:
    plan = _native.AttentionPlan()
    plan.num_heads, plan.num_kv_heads = attention.num_heads, attention.num_kv_heads
    plan.head_dim, plan.scale = attention.head_dim, attention.scale
    plan.qkv_bias, plan.out_bias = attention.qkv_bias, attention.out_bias
    plan.qk_norm, plan.qk_norm_after_rope = _norm(attention.qk_norm), attention.qk_norm_after_rope
    plan.normalize_over(attention.qk_norm_over)
    plan.rope = _rope(attention.rope)
    plan.sliding_window, plan.softcap = attention.sliding_window or 0, attention.softcap or 0.0
    plan.cache_group = context.group(attention.sliding_window)
    plan.alibi_slopes, plan.sinks = list(attention.alibi_slopes or ()), attention.sinks
    plan.output_gate = attention.output_gate
    if (temperature := attention.query_temperature) is not None:
        plan.query_temperature = _native.TemperaturePlan(temperature.beta, temperature.length, temperature.offset)
    plan.v_norm, plan.values_from_keys = _norm(attention.v_norm), attention.values_from_keys
    plan.shared_layer = context.layer(attention.kv_layer)
    scale = context.kv_scale(attention.kv_layer)
    plan.scale_kv(scale.k, scale.v)
    return plan


def _eagle3(layer: Eagle3Spec, context: _LayerContext, num_draft_tokens: int) -> _native.Eagle3Plan:
    plan = _native.Eagle3Plan(
        _norm_plan(layer.embedding_norm),
        _norm_plan(layer.hidden_norm),
        _attention(layer.attention, context),
        _residual(layer.mlp, context),
        _norm_plan(layer.final_norm),
    )
    plan.hidden_size, plan.vocab_size, plan.layers = layer.hidden_size, layer.vocab_size, list(layer.layers)
    plan.adds_normed, plan.own_embedding = layer.adds_normed, layer.own_embedding
    plan.token_ids, plan.num_draft_tokens = list(layer.token_ids or ()), num_draft_tokens
    return plan


def _alt_up(layer: AltUpSpec, context: _LayerContext) -> _native.AltUpPlan:
    return _native.AltUpPlan(
        layer.streams,
        layer.active,
        _norm_plan(layer.norm),
        [_residual(residual, context) for residual in layer.residuals],
        _residual(layer.passive, context),
        layer.scaled,
    )


def _mlp(mlp: MlpSpec) -> _native.MlpPlan:
    return _native.MlpPlan(mlp.intermediate_size, mlp.activation, mlp.gated, mlp.bias, mlp.gate_scale, mlp.cutoff)


def _delta_net(net: DeltaNetSpec) -> _native.DeltaNetPlan:
    norm = _norm(net.norm)
    assert norm is not None
    return _native.DeltaNetPlan(
        net.num_key_heads, net.num_value_heads, net.key_dim, net.value_dim, net.conv_kernel, norm, net.tiled
    )


def _mamba2(mamba: Mamba2Spec) -> _native.Mamba2Plan:
    plan = _native.Mamba2Plan()
    plan.num_heads, plan.head_dim = mamba.num_heads, mamba.head_dim
    plan.num_groups, plan.state_dim = mamba.num_groups, mamba.state_dim
    plan.conv_kernel, plan.conv_bias, plan.bias = mamba.conv_kernel, mamba.conv_bias, mamba.bias
    plan.norm, plan.norm_groups, plan.gate_first = _norm(mamba.norm), mamba.norm_groups, mamba.gate == "first"
    plan.min_dt, plan.max_dt = mamba.dt_limits
    plan.input_scales = list(mamba.input_scales)
    return plan


def _experts(experts: ExpertsSpec, unpacked: bool) -> _native.ExpertsPlan:
    router, shared = experts.router, experts.shared
    return _native.ExpertsPlan(
        experts.num_experts,
        experts.experts_per_token,
        experts.intermediate_size,
        experts.activation,
        experts.bias,
        experts.swiglu_limit or 0.0,
        experts.weighs_input,
        _native.RouterPlan(
            router.scores == "sigmoid",
            router.normalize,
            router.bias,
            router.correction_bias,
            router.num_groups,
            router.kept_groups,
            router.group_score == "best_two",
            router.scale,
            router.expert_scales,
            router.scores == "sparse_mixer",
            router.jitter,
        ),
        shared.intermediate_size if shared else 0,
        shared.activation if shared else "silu",
        experts.shared_gate,
        experts.gated,
        unpacked,
        _norm(experts.input_norm),
        _norm(router.norm),
        router.input_scale,
    )


def _latent_attention(attention: LatentAttentionSpec, context: _LayerContext) -> _native.LatentAttentionPlan:
    plan = _native.LatentAttentionPlan(_norm_plan(attention.norm), _rope_plan(attention.rope))
    plan.num_heads, plan.kv_rank, plan.q_rank = attention.num_heads, attention.kv_rank, attention.q_rank or 0
    plan.nope_dim, plan.rope_dim, plan.value_dim = attention.nope_dim, attention.rope_dim, attention.value_dim
    plan.scale, plan.bias = attention.scale, attention.bias
    plan.cache_group = context.group(attention.cached.window)
    plan.kv_scale = context.kv_scale(None).k
    return plan


def _rope(rope: RopeSpec | None) -> _native.RopePlan | None:
    return None if rope is None else _rope_plan(rope)


def _rope_plan(rope: RopeSpec) -> _native.RopePlan:
    return _native.RopePlan(list(rope.inv_freq), rope.attention_factor, rope.interleaved)


def _norm(norm: NormSpec | None) -> _native.NormPlan | None:
    return None if norm is None else _norm_plan(norm)


def _norm_plan(norm: NormSpec) -> _native.NormPlan:
    return _native.NormPlan(norm.kind == "layer", norm.eps, norm.bias, norm.weight, norm.unit_offset)
