"""Phi-3.5-MoE (https://arxiv.org/abs/2404.14219): Mixtral with LayerNorms, biases and a sparse mixer."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import ExpertsSpec, NormSpec, RouterSpec
from .expert_parts import EXPERT_NORMS, expert_count, expert_layers, experts_per_token, single_experts
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, uniform_layers

_LISTING = Listing("Phi-3.5-MoE", refused="any number of experts per token but two")
ARCHITECTURES = {"PhiMoEForCausalLM": _LISTING, "PhimoeForCausalLM": _LISTING}

_BLOCK = "block_sparse_moe"
_NAMES = {**EXPERT_NORMS, "router": f"{_BLOCK}.gate", **single_experts(_BLOCK, "w1", "w3", "w2")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Phi-3.5-MoE. Its mixer takes two experts."""
    config.refuse("num_experts_per_tok", 2)
    config = config.with_defaults(num_key_value_heads=8, num_local_experts=16, num_experts_per_tok=2, rope_theta=1e6)
    window = config.optional_integer("sliding_window")
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("layer", config.number("rms_norm_eps", 1e-5), bias=True)
    jitter = 0.0 if config.raw("router_jitter_noise") == 0 else config.number("router_jitter_noise", 0.01)
    num_layers = uniform_layers(config, "full_attention" if window is None else "sliding_attention")
    num_experts = expert_count(config, "num_local_experts")
    experts = ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts),
        config.integer("intermediate_size"),
        config.activation("hidden_act", "silu"),
        router=RouterSpec("sparse_mixer", normalize=False, jitter=jitter),
    )
    layers = expert_layers([replace(heads, rope=rope.spec, sliding_window=window)] * num_layers, experts, norm)
    head_bias = config.flag("lm_head_bias", False)
    spec = decoder(config, "phimoe", layers, norm, rope.max_positions, head_bias=head_bias)
    return llama_names(_NAMES).describe(spec)
