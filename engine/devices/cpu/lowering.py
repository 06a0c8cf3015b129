"""A DecoderSpec or a TowerSpec as the native runtime's plan."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

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
    MtpSpec,
    NormSpec,
    ParallelSpec,
    PerLayerEmbeddingSpec,
    PerLayerSpec,
    ResidualBlockSpec,
    RopeSpec,
    ShortConvSpec,
    StageSpec,
    StreamsSpec,
    TowerSpec,
    mixers,
    stage_tensors,
    tensor_shapes,
    tower_shapes,
)
from ...weights.kv_scales import KvScale, KvScales
from .formats import Formats, input_orders, plan_formats


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
    stage = stage or StageSpec(0, len(spec.layers), len(spec.layers))
    context = _LayerContext(spec, stage, unpacked_experts, kv_scales)
    embedding, head = spec.embedding, spec.head
    own = {name: formats[name] for name in stage_tensors(spec, stage) if name in formats}
    return _native.DecoderPlan(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        max_positions=max_positions,
        embeds=stage.is_first,
        has_head=stage.is_last,
        embedding=_native.EmbeddingPlan(
            size=embedding.size,
            num_positions=embedding.num_positions,
            position_offset=embedding.position_offset,
            scale=embedding.scale,
            norm=_norm(embedding.norm),
            per_layer=_per_layer(embedding.per_layer),
        ),
        layers=[
            [
                _residual(residual, context.of_layer(index))
                for residual in (layer if stage.begin <= index < stage.end else ())
            ]
            for index, layer in enumerate(spec.layers)
        ],
        final_norm=_norm(spec.final_norm),
        head=_native.HeadPlan(tied=head.tied, divisor=head.divisor, softcap=head.softcap or 0.0, bias=head.bias),
        streams=_streams(spec.streams),
        mtp=_mtp(spec.mtp, context, layer_draft_tokens) if stage.is_last else None,
        eagle3=_eagle3(spec.eagle3, context.unscaled(), layer_draft_tokens),
        formats=plan_formats(own, tensor_shapes(spec)),
        input_orders=input_orders(own),
    )


def lower_tower(spec: TowerSpec, formats: Formats) -> _native.TowerPlan:
    """The plan of a tower. Raises ValueError for an unknown format."""
    context = _TowerContext()
    return _native.TowerPlan(
        hidden_size=spec.hidden_size,
        layers=[[_residual(_with_axes(residual), context) for residual in layer] for layer in spec.layers],
        projections={
            name: _native.ProjectionPlan(
                inputs=projection.inputs,
                outputs=projection.outputs,
                bias=projection.bias,
                norm=_norm(projection.norm),
                activates=projection.activation is not None,
                activation=projection.activation or "silu",
            )
            for name, projection in spec.projections
        },
        cross_attentions={
            name: _native.CrossAttentionPlan(num_heads=one.num_heads, head_dim=one.head_dim, scale=one.scale)
            for name, one in spec.cross_attentions
        },
        formats=plan_formats(formats, tower_shapes(spec)),
        input_orders=input_orders(formats),
    )


def _with_axes(residual: ResidualBlockSpec) -> ResidualBlockSpec:
    """Its rope by axes, if it has one. Without them it would turn by the places of rows in their segment."""
    mixer = residual.mixer
    if isinstance(mixer, ParallelSpec):
        return replace(residual, mixer=ParallelSpec(tuple(map(_with_axes, mixer.residuals))))
    if not isinstance(mixer, AttentionSpec) or mixer.rope is None or mixer.rope.axes:
        return residual
    return replace(residual, mixer=replace(mixer, rope=replace(mixer.rope, axes=(0,) * len(mixer.rope.inv_freq))))


class _LayerContext:
    """What a mixer's spec does not say: whether experts are packed, and where each layer's K and V lie.

    That is their cache group, the number of the stage's layer within it, and what they are divided by there.
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


class _TowerContext(_LayerContext):
    """That of a tower's layers, which have one cache group and nothing of each other."""

    def __init__(self) -> None:
        self.unpacked_experts = False
        self._kv_scales, self._index = None, 0
        self._layers = {}

    def group(self, window: int | None) -> int:
        """The only one."""
        return 0


def _residual(residual: ResidualBlockSpec, context: _LayerContext) -> _native.ResidualBlockPlan:
    return _native.ResidualBlockPlan(
        mixer=_mixer(residual.mixer, context),
        norm=_norm(residual.norm),
        post_norm=_norm(residual.post_norm),
        sum_norm=_norm(residual.sum_norm),
        scale=residual.scale,
        sum_scale=residual.sum_scale,
        sum_factor=residual.sum_factor,
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
            return _native.LaurelPlan(rank=mixer.rank, norm=_norm_plan(mixer.norm))
        case AltUpSpec():
            return _alt_up(mixer, context)
        case DeltaNetSpec():
            return _delta_net(mixer)
        case Mamba2Spec():
            return _mamba2(mixer)
        case ShortConvSpec():
            return _native.ShortConvPlan(size=mixer.size, conv_kernel=mixer.conv_kernel, bias=mixer.bias)
        case ExpertsSpec():
            return _experts(mixer, context.unpacked_experts)
        case ParallelSpec():
            return _native.ParallelPlan(residuals=[_residual(residual, context) for residual in mixer.residuals])
        case PerLayerSpec():
            return _native.PerLayerPlan(layer=mixer.layer, size=mixer.size, activation=mixer.activation)
        case _:
            raise DeviceError(f"the cpu device has no {mixer.kind}")


def _per_layer(per_layer: PerLayerEmbeddingSpec | None) -> _native.PerLayerEmbeddingPlan | None:
    if per_layer is None:
        return None
    return _native.PerLayerEmbeddingPlan(
        vocab_size=per_layer.vocab_size,
        size=per_layer.size,
        scale=per_layer.scale,
        projection_scale=per_layer.projection_scale,
        sum_scale=per_layer.sum_scale,
        norm=_norm_plan(per_layer.norm),
    )


def _attention(attention: AttentionSpec, context: _LayerContext) -> _native.AttentionPlan:
    temperature, scales = attention.query_temperature, context.kv_scale(attention.kv_layer)
    return _native.AttentionPlan(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        scale=attention.scale,
        qkv_bias=attention.qkv_bias,
        out_bias=attention.out_bias,
        qk_norm=_norm(attention.qk_norm),
        qk_norm_over=attention.qk_norm_over,
        qk_norm_after_rope=attention.qk_norm_after_rope,
        rope=_rope(attention.rope),
        sliding_window=attention.sliding_window or 0,
        cache_group=context.group(attention.sliding_window),
        bias_span=attention.bias_span or 0,
        softcap=attention.softcap or 0.0,
        alibi_slopes=attention.alibi_slopes or (),
        sinks=attention.sinks,
        output_gate=attention.output_gate,
        query_temperature=None
        if temperature is None
        else _native.TemperaturePlan(beta=temperature.beta, length=temperature.length, offset=temperature.offset),
        v_norm=_norm(attention.v_norm),
        values_from_keys=attention.values_from_keys,
        shared_layer=context.layer(attention.kv_layer),
        kv_scales=_native.KvScales(k=scales.k, v=scales.v),
        two_way=attention.two_way,
        clipped=attention.clipped,
        disentangled=None
        if (positions := attention.disentangled) is None
        else _native.DisentangledPlan(
            num_rows=positions.num_rows,
            rows=positions.rows,
            content_to_position=positions.content_to_position,
            position_to_content=positions.position_to_content,
        ),
    )


def _streams(streams: StreamsSpec | None) -> _native.StreamsPlan | None:
    return None if streams is None else _native.StreamsPlan(count=streams.count, min_square=streams.min_square)


def _mtp(mtp: MtpSpec | None, context: _LayerContext, num_draft_tokens: int) -> _native.MtpPlan | None:
    if mtp is None:
        return None
    return _native.MtpPlan(
        embedding_norm=_norm_plan(mtp.embedding_norm),
        hidden_norm=_norm_plan(mtp.hidden_norm),
        layer=[_residual(residual, context) for residual in mtp.layer],
        final_norm=_norm_plan(mtp.final_norm),
        feeds_normed=mtp.feeds_normed,
        num_draft_tokens=num_draft_tokens,
    )


def _eagle3(layer: Eagle3Spec | None, context: _LayerContext, num_draft_tokens: int) -> _native.Eagle3Plan | None:
    if layer is None:
        return None
    return _native.Eagle3Plan(
        hidden_size=layer.hidden_size,
        vocab_size=layer.vocab_size,
        layers=layer.layers,
        embedding_norm=_norm_plan(layer.embedding_norm),
        hidden_norm=_norm_plan(layer.hidden_norm),
        attention=_attention(layer.attention, context),
        mlp=_residual(layer.mlp, context),
        final_norm=_norm_plan(layer.final_norm),
        own_embedding=layer.own_embedding,
        adds_normed=layer.adds_normed,
        token_ids=layer.token_ids or (),
        num_draft_tokens=num_draft_tokens,
    )


def _alt_up(layer: AltUpSpec, context: _LayerContext) -> _native.AltUpPlan:
    return _native.AltUpPlan(
        streams=layer.streams,
        active=layer.active,
        norm=_norm_plan(layer.norm),
        residuals=[_residual(residual, context) for residual in layer.residuals],
        passive=[_residual(layer.passive, context)],
        scaled=layer.scaled,
    )


def _mlp(mlp: MlpSpec) -> _native.MlpPlan:
    return _native.MlpPlan(
        intermediate_size=mlp.intermediate_size,
        activation=mlp.activation,
        gated=mlp.gated,
        bias=mlp.bias,
        gate_scale=mlp.gate_scale,
        cutoff=mlp.cutoff,
        clipped=mlp.clipped,
        down_bias=mlp.down_bias,
    )


def _delta_net(net: DeltaNetSpec) -> _native.DeltaNetPlan:
    return _native.DeltaNetPlan(
        num_key_heads=net.num_key_heads,
        num_value_heads=net.num_value_heads,
        key_dim=net.key_dim,
        value_dim=net.value_dim,
        conv_kernel=net.conv_kernel,
        norm=_norm_plan(net.norm),
        tiled=net.tiled,
    )


def _mamba2(mamba: Mamba2Spec) -> _native.Mamba2Plan:
    min_dt, max_dt = mamba.dt_limits
    return _native.Mamba2Plan(
        num_heads=mamba.num_heads,
        head_dim=mamba.head_dim,
        num_groups=mamba.num_groups,
        state_dim=mamba.state_dim,
        conv_kernel=mamba.conv_kernel,
        norm=_norm(mamba.norm),
        norm_groups=mamba.norm_groups,
        gate_first=mamba.gate == "first",
        min_dt=min_dt,
        max_dt=max_dt,
        conv_bias=mamba.conv_bias,
        bias=mamba.bias,
        input_scales=mamba.input_scales,
    )


def _experts(experts: ExpertsSpec, unpacked: bool) -> _native.ExpertsPlan:
    router, shared = experts.router, experts.shared
    return _native.ExpertsPlan(
        num_experts=experts.num_experts,
        experts_per_token=experts.experts_per_token,
        intermediate_size=experts.intermediate_size,
        activation=experts.activation,
        bias=experts.bias,
        swiglu_limit=experts.swiglu_limit or 0.0,
        weighs_input=experts.weighs_input,
        router=_native.RouterPlan(
            sigmoid=router.scores == "sigmoid",
            normalize=router.normalize,
            bias=router.bias,
            correction_bias=router.correction_bias,
            num_groups=router.num_groups,
            kept_groups=router.kept_groups,
            best_two=router.group_score == "best_two",
            scale=router.scale,
            expert_scales=router.expert_scales,
            sparse_mixer=router.scores == "sparse_mixer",
            jitter=router.jitter,
        ),
        shared_size=shared.intermediate_size if shared else 0,
        shared_activation=shared.activation if shared else "silu",
        shared_gate=experts.shared_gate,
        gated=experts.gated,
        unpacked=unpacked,
        input_norm=_norm(experts.input_norm),
        router_norm=_norm(router.norm),
        router_input_scale=router.input_scale,
        sum_bias=experts.sum_bias,
    )


def _latent_attention(attention: LatentAttentionSpec, context: _LayerContext) -> _native.LatentAttentionPlan:
    return _native.LatentAttentionPlan(
        num_heads=attention.num_heads,
        nope_dim=attention.nope_dim,
        rope_dim=attention.rope_dim,
        value_dim=attention.value_dim,
        kv_rank=attention.kv_rank,
        q_rank=attention.q_rank or 0,
        scale=attention.scale,
        bias=attention.bias,
        norm=_norm_plan(attention.norm),
        rope=_rope_plan(attention.rope),
        cache_group=context.group(attention.cached.window),
        kv_scale=context.kv_scale(None).k,
    )


def _rope(rope: RopeSpec | None) -> _native.RopePlan | None:
    return None if rope is None else _rope_plan(rope)


def _rope_plan(rope: RopeSpec) -> _native.RopePlan:
    return _native.RopePlan(
        inv_freq=rope.inv_freq, factor=rope.attention_factor, interleaved=rope.interleaved, axes=rope.axes
    )


def _norm(norm: NormSpec | None) -> _native.NormPlan | None:
    return None if norm is None else _norm_plan(norm)


def _norm_plan(norm: NormSpec) -> _native.NormPlan:
    return _native.NormPlan(
        kind=norm.kind, eps=norm.eps, bias=norm.bias, weight=norm.weight, unit_offset=norm.unit_offset
    )
