"""Granite 3 with experts (https://github.com/ibm-granite/granite-3.0-language-models).

Its checkpoints hold all experts' matrices in one tensor, with gate and up in the same matrix.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import ExpertsSpec, MlpSpec, NormSpec
from .expert_parts import EXPERT_NORMS, expert_count, expert_layers, experts_per_token, stacked
from .listing import Listing
from .names import fused_rows, llama_names
from .parts import attention, decoder, uniform_layers

_SHARED = "GraniteMoeSharedForCausalLM"
ARCHITECTURES = {
    "GraniteMoeForCausalLM": Listing("Granite 3, with experts"),
    _SHARED: Listing("Granite 3 and PowerMoE, with experts and an MLP beside them"),
}

_NAMES = llama_names(
    {**EXPERT_NORMS, "router": "block_sparse_moe.router.layer", "shared.down": "shared_mlp.output_linear"}
)


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Granite with experts. Each multiplier is 1 where the config has none, also the attention scores'."""
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    mixer = replace(heads, scale=config.number("attention_multiplier", 1.0), rope=rope.spec)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    num_experts, size = expert_count(config, "num_local_experts"), config.integer("intermediate_size")
    activation = config.activation("hidden_act", "silu")
    shared = None
    if architecture == _SHARED and config.raw("shared_intermediate_size") not in (None, 0):
        shared = MlpSpec(config.integer("shared_intermediate_size"), activation, gated=True)
    experts = ExpertsSpec(num_experts, experts_per_token(config, num_experts), size, activation, shared=shared)
    layers = expert_layers(
        [mixer] * uniform_layers(config), experts, norm, scale=config.number("residual_multiplier", 1.0)
    )
    spec = decoder(
        config,
        "granitemoeshared" if architecture == _SHARED else "granitemoe",
        layers,
        norm,
        rope.max_positions,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        divisor=config.number("logits_scaling", 1.0),
    )
    width = shared.intermediate_size if shared else 0
    both = fused_rows("shared_mlp.input_linear", gate=width, up=width) if width else {}
    gate_up, down = "block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"
    return _NAMES.describe(
        spec,
        {
            "experts.*.gate.weight": stacked(gate_up, rows=(0, size)),
            "experts.*.up.weight": stacked(gate_up, rows=(size, 2 * size)),
            "experts.*.down.weight": stacked(down),
            **{f"shared.{name}": ref for name, ref in both.items()},
        },
    )
