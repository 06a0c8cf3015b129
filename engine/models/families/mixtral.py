"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral with experts."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import ExpertsSpec, NormSpec
from .expert_parts import EXPERT_NORMS, expert_count, expert_layers, experts_per_token, single_experts
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, uniform_layers

ARCHITECTURES = {"MixtralForCausalLM": Listing("Mixtral")}

_BLOCK = "block_sparse_moe"
_NAMES = {**EXPERT_NORMS, "router": f"{_BLOCK}.gate", **single_experts(_BLOCK, "w1", "w3", "w2")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Mixtral. A config without `sliding_window` has none."""
    window = config.optional_integer("sliding_window")
    heads = attention(config.with_fields(num_key_value_heads=config.optional_integer("num_key_value_heads", 8)))
    rope = rope_from_config(config.with_defaults(rope_theta=1e6), heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    num_layers = uniform_layers(config, "full_attention" if window is None else "sliding_attention")
    num_experts = expert_count(config, "num_local_experts")
    experts = ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts),
        config.integer("intermediate_size"),
        config.activation("hidden_act", "silu"),
    )
    layers = expert_layers([replace(heads, rope=rope.spec, sliding_window=window)] * num_layers, experts, norm)
    return llama_names(_NAMES).describe(decoder(config, "mixtral", layers, norm, rope.max_positions))
