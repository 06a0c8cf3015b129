"""Granite 4 (https://github.com/ibm-granite/granite-4.0-language-models): Mamba2 layers, attention in some of them.

Its hybrids have no positions. Experts, where there are some, stand beside a dense MLP.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import ModelError
from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import ExpertsSpec, MixerSpec, MlpSpec, NormSpec, ResidualBlockSpec
from .expert_parts import EXPERT_NORMS, expert_count, experts_per_token, stacked
from .listing import Listing
from .mamba_parts import bamba_mixer, mamba_layers, mamba_refs
from .names import fused_rows, llama_names
from .parts import attention, decoder

ARCHITECTURES = {"GraniteMoeHybridForCausalLM": Listing("Granite 4")}

_NAMES = llama_names(
    {
        **EXPERT_NORMS,
        "mamba2_norm": "input_layernorm",
        "router": "block_sparse_moe.router.layer",
        "down": "shared_mlp.output_linear",
        "shared.down": "shared_mlp.output_linear",
    }
)


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Granite 4. Each multiplier is 1 where the config has none, also the attention scores'."""
    bias = config.flag("attention_bias", False)
    heads = replace(attention(config, qkv_bias=bias, out_bias=bias), scale=config.number("attention_multiplier", 1.0))
    positions = config.raw("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise ModelError("config.json: position_embedding_type must be rope or nope")
    longest = config.integer("max_position_embeddings", 2048)
    if positions == "rope":
        rope = rope_from_config(config.with_fields(max_position_embeddings=longest), heads.head_dim, max_model_len)
        heads, longest = replace(heads, rope=rope.spec), rope.max_positions
    norm, scale = NormSpec("rms", config.number("rms_norm_eps", 1e-6)), config.number("residual_multiplier", 1.0)
    mamba = bamba_mixer(config, norm)
    types = ["mamba"] * config.num_layers("num_hidden_layers")
    types = mamba_layers(config, "layer_types" if "layer_types" in config else "layers_block_type", types)
    shared = MlpSpec(
        config.integer("shared_intermediate_size", 1024), config.activation("hidden_act", "silu"), gated=True
    )
    mixers: dict[str, MixerSpec] = {"mamba": mamba, "attention": heads}
    mlp = _mlp(config, shared)
    layers = tuple(
        (ResidualBlockSpec(mixers[kind], norm, scale=scale), ResidualBlockSpec(mlp, norm, scale=scale))
        for kind in types
    )
    spec = decoder(
        config,
        "granitemoehybrid",
        layers,
        norm,
        longest,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        divisor=config.number("logits_scaling", 1.0),
    )
    refs = mamba_refs(mamba, "mamba")
    size = shared.intermediate_size
    both = fused_rows("shared_mlp.input_linear", gate=size, up=size)
    refs |= both | {f"shared.{name}": ref for name, ref in both.items()}
    if isinstance(mlp, ExpertsSpec):
        gate_up, size = "block_sparse_moe.input_linear.weight", mlp.intermediate_size
        refs |= {
            "experts.*.gate.weight": stacked(gate_up, rows=(0, size)),
            "experts.*.up.weight": stacked(gate_up, rows=(size, 2 * size)),
            "experts.*.down.weight": stacked("block_sparse_moe.output_linear.weight"),
        }
    return _NAMES.describe(spec, refs)


def _mlp(config: ConfigReader, shared: MlpSpec) -> MlpSpec | ExpertsSpec:
    if config.raw("num_local_experts") == 0:
        return shared
    config = config.with_defaults(num_local_experts=8, num_experts_per_tok=2)
    num_experts = expert_count(config, "num_local_experts")
    return ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts),
        config.integer("intermediate_size", 11008),
        shared.activation,
        shared=shared,
    )
