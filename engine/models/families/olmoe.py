"""OLMoE (https://arxiv.org/abs/2409.02060)."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import ExpertsSpec, NormSpec, RouterSpec
from .expert_parts import EXPERT_NORMS, QWEN_EXPERTS, expert_count, expert_layers, experts_per_token
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, uniform_layers

ARCHITECTURES = {"OlmoeForCausalLM": Listing("OLMoE", refused="`clip_qkv`")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """OLMoE. Queries and keys are normalized over all heads together."""
    config.refuse("clip_qkv")
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    num_experts = expert_count(config, "num_experts", "num_local_experts")
    experts = ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts),
        config.integer("intermediate_size"),
        config.activation("hidden_act", "silu"),
        router=RouterSpec(normalize=config.flag("norm_topk_prob", False)),
    )
    mixer = replace(heads, rope=rope.spec, qk_norm=norm, qk_norm_over="whole")
    layers = expert_layers([mixer] * uniform_layers(config), experts, norm)
    spec = decoder(config, "olmoe", layers, norm, rope.max_positions)
    return llama_names({**EXPERT_NORMS, **QWEN_EXPERTS}).describe(spec)
