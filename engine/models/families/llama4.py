"""Llama 4's language model (https://ai.meta.com/blog/llama-4-multimodal-intelligence/).

Layers with rope attend to chunks of the context, and every fourth layer, without rope, to all of it. It is served
within the first chunk, where both are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import AttentionSpec, ExpertsSpec, MlpSpec, NormSpec, RopeSpec, RouterSpec, TemperatureSpec
from .expert_parts import (
    EXPERT_NORMS,
    ExpertsApart,
    expert_count,
    expert_layers,
    experts_per_token,
    shared_expert,
    single_experts,
    stacked,
)
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder
from .smollm3 import layers_with_rope

ARCHITECTURES = {
    "Llama4ForCausalLM": Listing("Llama 4, text", refused="contexts longer than `attention_chunk_size`"),
}

_NAMES = llama_names({
    **EXPERT_NORMS,
    **shared_expert("feed_forward.shared_expert"),
    **single_experts("feed_forward", "gate_proj", "up_proj", "down_proj"),
    "router": "feed_forward.router",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
})  # fmt: skip


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Llama 4. A chosen expert's input is multiplied by the sigmoid of its logit."""
    bias = config.flag("attention_bias", False)
    config = config.with_defaults(head_dim=128)
    if "num_key_value_heads" not in config:
        config = config.with_fields(num_key_value_heads=8)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config.with_defaults(rope_theta=500000.0), heads.head_dim, max_model_len)
    norm, activation = NormSpec("rms", config.number("rms_norm_eps", 1e-5)), config.activation("hidden_act", "silu")
    num_experts, size = expert_count(config, "num_local_experts"), config.integer("intermediate_size")
    mlp = MlpSpec(size, activation, gated=True)
    experts = ExpertsSpec(
        num_experts,
        experts_per_token(config.with_defaults(num_experts_per_tok=1), num_experts),
        size,
        activation,
        weighs_input=True,
        router=RouterSpec("sigmoid", normalize=False),
        shared=mlp,
    )
    has_experts = _has_experts(config)
    if config.raw("no_rope_layers") == []:  # as the released files have it
        config = config.with_fields(no_rope_layers=None)
    with_rope = layers_with_rope(config)
    dense = None
    if not all(has_experts(layer) for layer in range(len(with_rope))):
        dense = MlpSpec(config.integer("intermediate_size_mlp"), activation, gated=True)
    turned = replace(rope.spec, interleaved=True)
    attentions = [_attention(config, heads, turned if rotated else None, norm) for rotated in with_rope]
    layers = expert_layers(attentions, experts, norm, dense, has_experts)
    chunk = config.optional_integer("attention_chunk_size", 8192)
    longest = rope.max_positions if chunk is None else min(rope.max_positions, chunk)
    gate_up = "feed_forward.experts.gate_up_proj"
    description = _NAMES.describe(
        decoder(config, "llama4", layers, norm, longest),
        {
            "experts.*.gate.weight": stacked(gate_up, transpose=True, rows=(0, size)),
            "experts.*.up.weight": stacked(gate_up, transpose=True, rows=(size, 2 * size)),
            "experts.*.down.weight": stacked("feed_forward.experts.down_proj", transpose=True),
        },
    )
    return replace(description, otherwise=ExpertsApart(_NAMES))


def _attention(config: ConfigReader, heads: AttentionSpec, rope: RopeSpec | None, norm: NormSpec) -> AttentionSpec:
    """With rope, queries and keys are normalized behind it; without, queries grow with their position."""
    if rope is not None:
        normalizes = config.flag("use_qk_norm", True)
        qk_norm = replace(norm, weight=False) if normalizes else None
        return replace(heads, rope=rope, qk_norm=qk_norm, qk_norm_after_rope=normalizes)
    tuning = config.raw("attn_temperature_tuning")  # early files have a number
    if not (tuning if isinstance(tuning, int) else config.flag("attn_temperature_tuning", True)):
        return heads
    temperature = TemperatureSpec(config.number("attn_scale", 0.1), config.integer("floor_scale", 8192), offset=1)
    return replace(heads, query_temperature=temperature)


def _has_experts(config: ConfigReader) -> Callable[[int], bool]:
    """The layers in `moe_layers`, or else the last of each `interleave_moe_layer_step`."""
    listed, step = config.raw("moe_layers"), config.integer("interleave_moe_layer_step", 1)
    if listed is None:
        return lambda layer: (layer + 1) % step == 0
    if not isinstance(listed, list) or any(type(layer) is not int for layer in listed):
        raise config.error("moe_layers", "a list of layers' numbers")
    return lambda layer: layer in listed
