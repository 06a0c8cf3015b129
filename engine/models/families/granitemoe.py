"""Granite 3 with experts (https://github.com/ibm-granite/granite-3.0-language-models).

Its checkpoints hold the matrices of all experts in one tensor, those of gate and up in the same rows.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import ExpertsSpec, NormSpec
from .expert_parts import EXPERT_NORMS, expert_count, expert_layers, experts_per_token, stacked
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, uniform_layers

ARCHITECTURES = {"GraniteMoeForCausalLM": Listing("Granite 3, with experts")}

_NAMES = llama_names({**EXPERT_NORMS, "router": "block_sparse_moe.router.layer"})


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Granite with experts. Each multiplier is 1 where the config has none, also that of the attention scores."""
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    mixer = replace(heads, scale=config.number("attention_multiplier", 1.0), rope=rope.spec)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    num_experts, size = expert_count(config, "num_local_experts"), config.integer("intermediate_size")
    experts = ExpertsSpec(
        num_experts, experts_per_token(config, num_experts), size, config.activation("hidden_act", "silu")
    )
    layers = expert_layers(
        [mixer] * uniform_layers(config), experts, norm, scale=config.number("residual_multiplier", 1.0)
    )
    spec = decoder(
        config,
        "granitemoe",
        layers,
        norm,
        rope.max_positions,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        divisor=config.number("logits_scaling", 1.0),
    )
    gate_up, down = "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"
    return _NAMES.describe(
        spec,
        {
            "experts.*.gate.weight": stacked(gate_up, rows=(0, size)),
            "experts.*.up.weight": stacked(gate_up, rows=(size, 2 * size)),
            "experts.*.down.weight": stacked(down),
        },
    )
