"""Llama (https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783). SmolLM and SmolLM2 are Llamas."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, pre_norm_layers, uniform_layers

ARCHITECTURES = {"LlamaForCausalLM": Listing("Llama 2 and 3, SmolLM, SmolLM2, and other models with this architecture")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Llama."""
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    mlp = gated_mlp(config, bias=config.flag("mlp_bias", False))
    layers = pre_norm_layers([replace(heads, rope=rope.spec)] * uniform_layers(config), mlp, norm)
    return llama_names(PRE_NORMS).describe(decoder(config, "llama", layers, norm, rope.max_positions))
