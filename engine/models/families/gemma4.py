"""Gemma 4, the models for text: windows, heads of two sizes, K and V shared by the last layers, per-layer embeddings.

As in https://github.com/huggingface/transformers/blob/main/src/transformers/models/gemma4/modeling_gemma4.py.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import ModelError
from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import Rope, rope_from_config
from ..spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    NormSpec,
    ParallelSpec,
    PerLayerEmbeddingSpec,
    PerLayerSpec,
    ResidualBlockSpec,
    RouterSpec,
)
from ..tensor_ref import TensorRef
from .expert_parts import expert_count, experts_per_token, stacked
from .gemma_parts import (
    last_with,
    layers_with_kv,
    per_layer_embedding,
    per_layer_names,
    per_layer_size,
)
from .listing import Listing
from .names import CheckpointNames
from .parts import attention, decoder, gated_mlp, layer_windows

ARCHITECTURES = {"Gemma4ForCausalLM": Listing("Gemma 4, the text models", refused="bidirectional attention")}

_WINDOWS_EVERY = 6  # where the config has no `layer_types`, every sixth layer has no window
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_MODULES = {
    "attention_norm": "input_layernorm",
    "mlp_sum_scale": "layer_scalar",
    "per_layer_sum_scale": "layer_scalar",
}
# For layers with experts: the MLP's result is normalized before the experts' is added, and the sum is normalized again.
_EXPERTS = {
    "mlp_post_norm": "post_feedforward_layernorm_1",
    "router": "router.proj",
    "router_norm.weight": "router.scale",
    "router.expert_scales": "router.per_expert_scale",
    "experts_input_norm": "pre_feedforward_layernorm_2",
    "experts_post_norm": "post_feedforward_layernorm_2",
    "parallel_post_norm": "post_feedforward_layernorm",
    "parallel_sum_scale": "layer_scalar",
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Gemma 4. The last layer has no window, whatever the config says."""
    config.refuse("use_bidirectional_attention", "vision")  # which text does not feel
    config = config.with_defaults(num_key_value_heads=4, head_dim=256, max_position_embeddings=131072)
    attentions, max_positions = _attentions(config, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    spec = decoder(
        config,
        "gemma4",
        tuple(_layer(config, i, mixer, norm) for i, mixer in enumerate(attentions)),
        norm,
        max_positions,
        tied=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        softcap=config.optional_number("final_logit_softcapping"),
        per_layer=_embedding(config, norm),
    )
    return _names(config).describe(spec, _expert_refs(config))


def _layer(config: ConfigReader, index: int, mixer: AttentionSpec, norm: NormSpec) -> LayerSpec:
    activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
    mlp = gated_mlp(config, activation)
    if mixer.kv_layer is not None and config.flag("use_double_wide_mlp", False):
        mlp = replace(mlp, intermediate_size=2 * mlp.intermediate_size)
    size = per_layer_size(config)
    beside = ResidualBlockSpec(mlp, norm, norm)
    if _has_experts(config):
        experts = ResidualBlockSpec(_experts(config, norm), post_norm=norm)
        beside = ResidualBlockSpec(ParallelSpec((beside, experts)), post_norm=norm)
    residuals = [ResidualBlockSpec(mixer, norm, norm), beside]
    if size:
        residuals.append(ResidualBlockSpec(PerLayerSpec(index, size, activation), post_norm=norm))
    residuals[-1] = replace(residuals[-1], sum_scale=True)
    return tuple(residuals)


def _has_experts(config: ConfigReader) -> bool:
    return config.flag("enable_moe_block", False)


def _experts(config: ConfigReader, norm: NormSpec) -> ExpertsSpec:
    """Experts beside the MLP. They and their router read the residual stream, each through a norm of its own."""
    num_experts = expert_count(config, "num_experts")
    return ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts, "top_k_experts"),
        config.integer("moe_intermediate_size"),
        config.activation("hidden_activation", "gelu_pytorch_tanh"),
        router=RouterSpec(norm=norm, input_scale=config.integer("hidden_size") ** -0.5, expert_scales=True),
        input_norm=norm,
    )


def _names(config: ConfigReader) -> CheckpointNames:
    return per_layer_names({**_MODULES, **_EXPERTS} if _has_experts(config) else _MODULES)


def _expert_refs(config: ConfigReader) -> dict[str, TensorRef]:
    if not _has_experts(config):
        return {}
    size, gate_up = config.integer("moe_intermediate_size"), "experts.gate_up_proj"
    return {
        "experts.*.gate.weight": stacked(gate_up, rows=(0, size)),
        "experts.*.up.weight": stacked(gate_up, rows=(size, 2 * size)),
        "experts.*.down.weight": stacked("experts.down_proj"),
    }


def _embedding(config: ConfigReader, norm: NormSpec) -> PerLayerEmbeddingSpec | None:
    embedding = per_layer_embedding(config, norm)
    if embedding is not None and embedding.vocab_size < config.integer("vocab_size"):
        raise ModelError("config.json: vocab_size_per_layer_input must be at least vocab_size")
    return embedding


def _attentions(config: ConfigReader, max_model_len: int | None) -> tuple[tuple[AttentionSpec, ...], int]:
    """The attention of each layer, and the longest context."""
    window = config.optional_integer("sliding_window", 512)
    windows = layer_windows(config, window, lambda i: (i + 1) % _WINDOWS_EVERY != 0)
    windows = (*windows[:-1], None)  # whatever the config says of the last layer
    own = layers_with_kv(config, len(windows))
    bias = config.flag("attention_bias", False)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    keys_are_values = config.flag("attention_k_eq_v", False)
    mixers: list[AttentionSpec] = []
    longest = config.integer("max_position_embeddings")
    for index, window in enumerate(windows):
        heads = replace(attention(_heads(config, index, window), qkv_bias=bias, out_bias=bias), scale=1.0)
        rope = _rope(config, window, heads.head_dim, max_model_len)
        longest = min(longest, rope.max_positions)
        mixer = replace(
            heads,
            qk_norm=norm,
            rope=rope.spec,
            sliding_window=window,
            v_norm=replace(norm, weight=False),
            values_from_keys=keys_are_values and window is None,
        )
        if index >= own:
            source = last_with(windows[:own], window)
            mixer = replace(mixer, v_norm=None, values_from_keys=False, kv_layer=source)
            if replace(mixer, kv_layer=None).cached != mixers[source].cached:
                raise ModelError(f"config.json: layers {source} and {index} share K and V, but not the size of heads")
        mixers.append(mixer)
    return tuple(mixers), longest


def _heads(config: ConfigReader, index: int, window: int | None) -> ConfigReader:
    """The config with one layer's heads, from `per_layer_config` or from the fields for global layers."""
    by_layer = config.raw("per_layer_config")
    if by_layer is not None:
        own = by_layer.get(str(index), by_layer.get(index, {})) if isinstance(by_layer, dict) else None
        if not isinstance(own, dict) or not own.keys() <= {"head_dim", "num_key_value_heads"}:
            raise config.error("per_layer_config", "an object from layers to their head_dim and num_key_value_heads")
        return config.with_fields(**own)
    if window is not None:
        return config
    kv_heads = config.raw("num_global_key_value_heads") if config.flag("attention_k_eq_v", False) else None
    return config.with_fields(
        head_dim=config.integer("global_head_dim", 512),
        num_key_value_heads=config.integer("num_key_value_heads") if kv_heads is None else kv_heads,
    )


def _rope(config: ConfigReader, window: int | None, head_dim: int, max_model_len: int | None) -> Rope:
    by_type = config.with_defaults(rope_parameters=_ROPES).raw("rope_parameters")
    layer_type = "full_attention" if window is None else "sliding_attention"
    parameters = by_type.get(layer_type) if isinstance(by_type, dict) else None
    if not isinstance(parameters, dict):
        raise config.error("rope_parameters", f"an object with an object for {layer_type}")
    return rope_from_config(config.with_fields(rope_parameters=parameters), head_dim, max_model_len)
