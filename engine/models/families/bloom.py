"""Bloom (https://arxiv.org/abs/2211.05100): ALiBi instead of position embeddings, and a norm after the embedding."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import EmbeddingSpec, MlpSpec, NormSpec, ResidualBlockSpec
from .listing import Listing
from .names import CheckpointNames, fused_heads
from .parts import alibi_slopes, attention, decoder, uniform_layers

ARCHITECTURES = {"BloomForCausalLM": Listing("Bloom, Bloomz", refused="`apply_residual_connection_post_layernorm`")}

_NAMES = CheckpointNames(
    base="transformer.",
    top={
        "embed.weight": "word_embeddings.weight",
        "embed.norm.weight": "word_embeddings_layernorm.weight",
        "embed.norm.bias": "word_embeddings_layernorm.bias",
        "final_norm.weight": "ln_f.weight",
        "final_norm.bias": "ln_f.bias",
    },
    layers="h",
    modules={
        "attention_norm": "input_layernorm",
        "o": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
)
_OTHER_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embed"}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Bloom. The context is the length of its training, `seq_length`."""
    config.refuse("apply_residual_connection_post_layernorm", False)
    given = {name: config.raw(other) for name, other in _OTHER_NAMES.items() if config.raw(other) is not None}
    config = config.with_fields(**given, num_key_value_heads=None, head_dim=None)
    heads = attention(config, qkv_bias=True, out_bias=True)
    mixer = replace(heads, alibi_slopes=alibi_slopes(config, "num_attention_heads"))
    hidden, norm = (
        config.integer("hidden_size"),
        NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias=True),
    )
    mlp = MlpSpec(4 * hidden, "gelu_tanh", gated=False, bias=True)
    layer = (ResidualBlockSpec(mixer, norm), ResidualBlockSpec(mlp, norm))
    layers, longest = (layer,) * uniform_layers(config), config.integer("seq_length", 2048)
    spec = decoder(config, "bloom", layers, norm, longest, tied=True)
    spec = replace(spec, embedding=EmbeddingSpec(hidden, norm=norm))
    return _NAMES.describe(spec, fused_heads("self_attention.query_key_value", 1, heads.head_dim))
