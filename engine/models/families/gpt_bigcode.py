"""GPT-BigCode, such as StarCoder (https://arxiv.org/abs/2305.06161): GPT-2, mostly with one KV head for all queries."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import EmbeddingSpec, MlpSpec, NormSpec, ResidualBlockSpec
from .listing import Listing
from .names import CheckpointNames, fused_heads, fused_rows
from .parts import attention, decoder, uniform_layers

ARCHITECTURES = {"GPTBigCodeForCausalLM": Listing("StarCoder, SantaCoder", refused="cross-attention")}

_FUSED = "attn.c_attn"
_NAMES = CheckpointNames(
    base="transformer.",
    top={
        "embed.weight": "wte.weight",
        "embed.positions": "wpe.weight",
        "final_norm.weight": "ln_f.weight",
        "final_norm.bias": "ln_f.bias",
    },
    layers="h",
    modules={
        "attention_norm": "ln_1",
        "o": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
)


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """GPT-BigCode. Its fields about float32 ask for what devices do anyway."""
    config.refuse("add_cross_attention", False)
    hidden, num_heads = config.integer("n_embd"), config.integer("n_head")
    one_kv_head, num_positions = config.flag("multi_query", True), config.integer("n_positions", 1024)
    config = config.with_fields(
        hidden_size=hidden,
        num_attention_heads=num_heads,
        num_key_value_heads=1 if one_kv_head else num_heads,
        num_hidden_layers=config.num_layers("n_layer"),
        head_dim=None,
    )
    heads = attention(config, qkv_bias=True, out_bias=True)
    if not config.flag("scale_attn_weights", True):
        heads = replace(heads, scale=1.0)
    activation = config.activation("activation_function", "gelu_pytorch_tanh")
    mlp = MlpSpec(config.integer("n_inner", 4 * hidden), activation, gated=False, bias=True)
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias=True)
    layer = (ResidualBlockSpec(heads, norm), ResidualBlockSpec(mlp, norm))
    spec = decoder(config, "gpt_bigcode", (layer,) * uniform_layers(config), norm, num_positions, tied=True)
    spec = replace(spec, embedding=EmbeddingSpec(hidden, num_positions))
    if one_kv_head:
        return _NAMES.describe(spec, fused_rows(_FUSED, q=heads.q_size, k=heads.kv_size, v=heads.kv_size))
    return _NAMES.describe(spec, fused_heads(_FUSED, 1, heads.head_dim))
