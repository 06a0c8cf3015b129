"""Mistral (https://arxiv.org/abs/2310.06825): Llama whose layers attend to a window; in Ministral, some of them."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, layer_windows, pre_norm_layers, uniform_layers, with_windows

ARCHITECTURES = {
    "MistralForCausalLM": Listing("Mistral, with or without sliding windows"),
    "MinistralForCausalLM": Listing("Ministral 8B"),
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Mistral. A config without `sliding_window` has one of 4096; null is none."""
    window = config.optional_integer("sliding_window", 4096)
    heads = attention(config)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    if architecture == "MinistralForCausalLM":
        family, windows = "ministral", layer_windows(config, window, lambda i: window is not None)
    else:
        num_layers = uniform_layers(config, "full_attention" if window is None else "sliding_attention")
        family, windows = "mistral", (window,) * num_layers
    layers = pre_norm_layers(with_windows(replace(heads, rope=rope.spec), windows), gated_mlp(config), norm)
    return llama_names(PRE_NORMS).describe(decoder(config, family, layers, norm, rope.max_positions))
