"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): Llama with four multipliers (muP)."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec, ResidualBlockSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, uniform_layers

ARCHITECTURES = {"GraniteForCausalLM": Listing("Granite 3, dense")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Granite, dense. Each multiplier is 1 where the config has none, also the attention scores'."""
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    mixer = replace(heads, scale=config.number("attention_multiplier", 1.0), rope=rope.spec)
    mlp = gated_mlp(config, bias=config.flag("mlp_bias", False))
    norm, scale = NormSpec("rms", config.number("rms_norm_eps", 1e-6)), config.number("residual_multiplier", 1.0)
    layer = (ResidualBlockSpec(mixer, norm, scale=scale), ResidualBlockSpec(mlp, norm, scale=scale))
    spec = decoder(
        config,
        "granite",
        (layer,) * uniform_layers(config),
        norm,
        rope.max_positions,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        divisor=config.number("logits_scaling", 1.0),
    )
    return llama_names(PRE_NORMS).describe(spec)
