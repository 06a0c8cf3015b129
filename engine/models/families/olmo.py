"""OLMo (https://arxiv.org/abs/2402.00838): Llama with LayerNorms that have no weights."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, gated_mlp, pre_norm_layers, uniform_layers

ARCHITECTURES = {"OlmoForCausalLM": Listing("OLMo", refused="`clip_qkv`, which the first 7B model has")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """OLMo. Models that clip their queries, keys and values (`clip_qkv`, as the first 7B does) are refused."""
    config.refuse("clip_qkv")
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("layer", eps=1e-5, weight=False)
    mixers = [replace(heads, rope=rope.spec)] * uniform_layers(config)
    layers = pre_norm_layers(mixers, gated_mlp(config), norm)
    return llama_names({}).describe(decoder(config, "olmo", layers, norm, rope.max_positions))
