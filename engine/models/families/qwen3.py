"""Qwen3 (https://arxiv.org/abs/2505.09388), dense: Qwen2 with query and key norms and a head dim of its own."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, pre_norm_layers, with_windows
from .qwen2 import sliding_windows

ARCHITECTURES = {"Qwen3ForCausalLM": Listing("Qwen3, dense")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen3. A config without `head_dim` means 128, whatever its hidden size."""
    bias = config.flag("attention_bias", False)
    heads = attention(config.with_defaults(head_dim=128), qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    mixers = with_windows(replace(heads, rope=rope.spec, qk_norm=norm), sliding_windows(config))
    layers = pre_norm_layers(mixers, gated_mlp(config), norm)
    return llama_names(PRE_NORMS).describe(decoder(config, "qwen3", layers, norm, rope.max_positions))
