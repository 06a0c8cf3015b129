"""Gemma 3n, text: several residual streams, per-layer embeddings, gates with most values cut off.

As in https://github.com/huggingface/transformers/blob/main/src/transformers/models/gemma3n/modeling_gemma3n.py.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import (
    AltUpSpec,
    AttentionSpec,
    LaurelSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    ParallelSpec,
    PerLayerSpec,
    ResidualBlockSpec,
    StreamsSpec,
)
from ..tensor_ref import TensorRef
from .gemma_parts import (
    last_with,
    layers_with_kv,
    per_layer_embedding,
    per_layer_names,
)
from .listing import Listing
from .names import CheckpointNames
from .parts import attention, decoder, layer_windows, rope_of_layer_type

ARCHITECTURES = {"Gemma3nForCausalLM": Listing("Gemma 3n, text")}

_WINDOWS_EVERY = 5  # where the config has no `layer_types`, every fifth layer has no window
_MIN_SQUARE = 1e-5
_MAX_STREAMS = 16
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # of models with more layers than these, where the config does not say
_MODULES = {
    "parallel_norm": "input_layernorm",
    "laurel_down": "laurel.linear_left",
    "laurel_up": "laurel.linear_right",
    "laurel_out_norm": "laurel.post_laurel_norm",
    "alt_up.router": "altup.modality_router",
    "alt_up.norm": "altup.router_norm",
    "alt_up.scale": "altup.correct_output_scale",
}
_FLAT = {
    "alt_up.predict": TensorRef("altup.prediction_coefs.weight", flat=True),
    "alt_up.correct": TensorRef("altup.correction_coefs.weight", flat=True),
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Gemma 3n."""
    config = config.with_defaults(num_key_value_heads=2, head_dim=256, max_position_embeddings=32768)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    attentions, max_positions = _attentions(config, norm, max_model_len)
    streams = StreamsSpec(_stream_count(config), _MIN_SQUARE)
    mlps = _mlps(config, len(attentions))
    spec = decoder(
        config,
        "gemma3n",
        tuple(
            _layer(config, i, mixer, mlp, norm, streams)
            for i, (mixer, mlp) in enumerate(zip(attentions, mlps, strict=True))
        ),
        norm,
        max_positions,
        tied=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        softcap=config.optional_number("final_logit_softcapping", 30.0),
        per_layer=per_layer_embedding(config, norm),
        streams=streams,
    )
    return _names(streams.count).describe(spec, _FLAT)


def _layer(
    config: ConfigReader, index: int, mixer: AttentionSpec, mlp: MlpSpec, norm: NormSpec, streams: StreamsSpec
) -> LayerSpec:
    laurel = LaurelSpec(config.integer("laurel_rank", 64), norm)
    beside = ParallelSpec((ResidualBlockSpec(mixer, post_norm=norm), ResidualBlockSpec(laurel)))
    residuals = (ResidualBlockSpec(beside, norm, sum_factor=2**-0.5), ResidualBlockSpec(mlp, norm, norm))
    size = config.integer("hidden_size_per_layer_input", 256)
    passive = ResidualBlockSpec(PerLayerSpec(index, size, mlp.activation), post_norm=norm)
    active = config.raw("altup_active_idx") or 0
    if type(active) is not int or not 0 <= active < streams.count:
        raise config.error("altup_active_idx", f"the number of one of {streams.count} streams")
    scaled = config.flag("altup_correct_scale", True)
    return (ResidualBlockSpec(AltUpSpec(streams.count, active, norm, residuals, passive, scaled)),)


def _stream_count(config: ConfigReader) -> int:
    count = config.integer("altup_num_inputs", 4)
    if not 2 <= count <= _MAX_STREAMS:
        raise config.error("altup_num_inputs", f"2 to {_MAX_STREAMS}")
    return count


def _attentions(
    config: ConfigReader, norm: NormSpec, max_model_len: int | None
) -> tuple[tuple[AttentionSpec, ...], int]:
    """The attention of each layer, and the longest context."""
    bias = config.flag("attention_bias", False)
    heads = replace(attention(config, qkv_bias=bias, out_bias=bias), scale=1.0, qk_norm=norm)
    window = config.optional_integer("sliding_window", 512)
    windows = layer_windows(config, window, lambda i: (i + 1) % _WINDOWS_EVERY != 0)
    own = layers_with_kv(config, len(windows), default=15)
    full, sliding = (
        rope_of_layer_type(config, layer_type, theta_name, theta, heads.head_dim, max_model_len)
        for layer_type, theta_name, theta in (
            ("full_attention", "rope_theta", 1e6),
            ("sliding_attention", "rope_local_base_freq", 1e4),
        )
    )
    mixers = []
    for index, width in enumerate(windows):
        mixer = replace(heads, rope=(sliding if width else full).spec, sliding_window=width)
        if index < own:
            mixer = replace(mixer, v_norm=replace(norm, weight=False))
        else:
            mixer = replace(mixer, kv_layer=last_with(windows[:own], width))
        mixers.append(mixer)
    longest = min(full.max_positions, sliding.max_positions, config.integer("max_position_embeddings"))
    return tuple(mixers), longest


def _mlps(config: ConfigReader, num_layers: int) -> list[MlpSpec]:
    activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
    sizes = config.raw("intermediate_size")
    if not isinstance(sizes, list):
        sizes = [config.integer("intermediate_size", 16_384)] * num_layers
    if len(sizes) != num_layers or any(type(size) is not int or size < 1 for size in sizes):
        raise config.error("intermediate_size", f"a positive integer, or a list of {num_layers}")
    shares = config.raw("activation_sparsity_pattern")
    if shares is None:
        sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        shares = [_SPARSITY] * sparse + [0.0] * (num_layers - sparse)
    if (
        not isinstance(shares, list)
        or len(shares) != num_layers
        or any(type(share) not in (int, float) or not 0 <= share < 1 for share in shares)
    ):
        raise config.error("activation_sparsity_pattern", f"a list of {num_layers} numbers from 0 to below 1")
    return [
        MlpSpec(size, activation, gated=True, cutoff=NormalDist().inv_cdf(share) if share else None)
        for size, share in zip(sizes, shares, strict=True)
    ]


def _names(count: int) -> CheckpointNames:
    streams = {
        f"{end}.stream.{i}.weight": f"{module}.{i - 1}.weight"
        for end, module in (("embed", "altup_projections"), ("final", "altup_unembed_projections"))
        for i in range(1, count)
    }
    return per_layer_names(_MODULES, streams)
