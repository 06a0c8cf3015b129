"""Mistral (https://arxiv.org/abs/2310.06825): Llama whose layers all attend to a window."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, pre_norm_layers, uniform_layers

ARCHITECTURES = {"MistralForCausalLM": Listing("Mistral, with or without sliding windows")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Mistral. A config without `sliding_window` has one of 4096; null is none."""
    window = config.optional_integer("sliding_window", 4096)
    heads = attention(config)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    num_layers = uniform_layers(config, "full_attention" if window is None else "sliding_attention")
    mixer = replace(heads, rope=rope.spec, sliding_window=window)
    layers = pre_norm_layers([mixer] * num_layers, gated_mlp(config), norm)
    return llama_names(PRE_NORMS).describe(decoder(config, "mistral", layers, norm, rope.max_positions))
