"""Qwen3 with experts (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import ExpertsSpec, NormSpec, RouterSpec
from .expert_parts import (
    EXPERT_NORMS,
    QWEN_EXPERTS,
    ExpertsTogether,
    expert_count,
    expert_layers,
    experts_per_token,
    sparse_layers,
)
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, gated_mlp, uniform_layers, with_windows

ARCHITECTURES = {"Qwen3MoeForCausalLM": Listing("Qwen3, with experts")}

_BASE = "model."


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen3-MoE. All layers slide where a window is used. Qwen3-VL's checkpoints hold a layer's experts together."""
    bias = config.flag("attention_bias", False)
    heads = attention(config.with_defaults(num_key_value_heads=4), qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    use = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window", 4096) if use else None
    num_layers = uniform_layers(config, "full_attention" if window is None else "sliding_attention")
    num_experts = expert_count(config, "num_experts", "num_local_experts")
    experts = ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts),
        config.integer("moe_intermediate_size"),
        config.activation("hidden_act", "silu"),
        router=RouterSpec(normalize=config.flag("norm_topk_prob", False)),
    )
    attentions = with_windows(replace(heads, rope=rope.spec, qk_norm=norm), [window] * num_layers)
    layers = expert_layers(attentions, experts, norm, gated_mlp(config), sparse_layers(config))
    spec = decoder(config, "qwen3_moe", layers, norm, rope.max_positions)
    description = llama_names({**EXPERT_NORMS, **QWEN_EXPERTS}, _BASE).describe(spec)
    return replace(description, otherwise=ExpertsTogether(_BASE, experts.intermediate_size, may_transpose=True))
