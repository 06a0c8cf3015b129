"""The first Gemma (https://arxiv.org/abs/2403.08295), CodeGemma: Llama with scaled embeddings and wide heads."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, pre_norm_layers, uniform_layers

ARCHITECTURES = {"GemmaForCausalLM": Listing("Gemma, CodeGemma", refused="bidirectional attention")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Gemma. Where early configs say gelu, they mean its approximation by tanh."""
    config.refuse("use_bidirectional_attention", False)
    config = config.with_defaults(head_dim=256, num_key_value_heads=16)
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6), unit_offset=True)
    name = "hidden_act" if config.raw("hidden_activation") is None else "hidden_activation"
    is_tanh = config.raw(name) in (None, "gelu")
    mlp = gated_mlp(config, "gelu_tanh" if is_tanh else config.activation(name, "gelu_pytorch_tanh"))
    layers = pre_norm_layers([replace(heads, rope=rope.spec)] * uniform_layers(config), mlp, norm)
    scale = config.integer("hidden_size") ** 0.5
    spec = decoder(config, "gemma", layers, norm, rope.max_positions, tied=True, embedding_scale=scale)
    return llama_names(PRE_NORMS).describe(spec)
