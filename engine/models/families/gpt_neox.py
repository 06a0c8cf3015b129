"""GPT-NeoX (https://arxiv.org/abs/2204.06745) and Pythia (https://arxiv.org/abs/2304.01373).

Attention and MLP lie side by side, each after a LayerNorm of its own. Queries, keys and values are in one matrix, head
by head, and a quarter of each head is rotated.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import LayerSpec, MlpSpec, NormSpec, ParallelSpec, ResidualBlockSpec
from .listing import Listing
from .names import CheckpointNames, fused_heads
from .parts import attention, decoder, uniform_layers

ARCHITECTURES = {"GPTNeoXForCausalLM": Listing("GPT-NeoX, Pythia")}

_NAMES = CheckpointNames(
    base="gpt_neox.",
    top={
        "embed.weight": "embed_in.weight",
        "final_norm.weight": "final_layer_norm.weight",
        "final_norm.bias": "final_layer_norm.bias",
    },
    layers="layers",
    modules={
        "attention_norm": "input_layernorm",
        "o": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    head="embed_out.weight",
)


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """GPT-NeoX. Without `use_parallel_residual` the MLP comes after the attention."""
    config = config.with_fields(
        # It has its own names for these, and looks at no others.
        rope_theta=config.number("rotary_emb_base", 10000.0),
        partial_rotary_factor=config.number("rotary_pct", 0.25),
        num_key_value_heads=None,
        head_dim=None,
    )
    bias = config.flag("attention_bias", True)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-5), bias=True)
    size, activation = config.integer("intermediate_size"), config.activation("hidden_act", "gelu")
    layer: LayerSpec = (
        ResidualBlockSpec(replace(heads, rope=rope.spec), norm),
        ResidualBlockSpec(MlpSpec(size, activation, gated=False, bias=True), norm),
    )
    if config.flag("use_parallel_residual", True):
        layer = (ResidualBlockSpec(ParallelSpec(layer)),)
    spec = decoder(config, "gpt_neox", (layer,) * uniform_layers(config), norm, rope.max_positions)
    return _NAMES.describe(spec, fused_heads("attention.query_key_value", 1, heads.head_dim))
