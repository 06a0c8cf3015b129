"""MiniCPM (https://arxiv.org/abs/2404.06395), 1, 2 and 4, dense: Llama with multipliers for its depth and width."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec, ResidualBlockSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, uniform_layers

ARCHITECTURES = {"MiniCPMForCausalLM": Listing("MiniCPM, MiniCPM 4, dense", refused="sparse attention; experts")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """MiniCPM. Sparse attention, which its 4th version may use beyond a length, is refused."""
    config.refuse("sparse_config")
    config.refuse("num_experts", 0)
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm, num_layers = NormSpec("rms", config.number("rms_norm_eps", 1e-6)), uniform_layers(config)
    scale = config.number("scale_depth", 1.0) / num_layers**0.5
    layer = tuple(
        ResidualBlockSpec(part, norm, scale=scale) for part in (replace(heads, rope=rope.spec), gated_mlp(config))
    )
    hidden = config.integer("hidden_size")
    spec = decoder(
        config,
        "minicpm",
        (layer,) * num_layers,
        norm,
        rope.max_positions,
        tied=True,
        embedding_scale=config.number("scale_emb", 1.0),
        divisor=hidden / config.number("dim_model_base", 1.0),
    )
    return llama_names(PRE_NORMS).describe(spec)
