"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): Llama with biases on the query, key and value projections."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, layer_windows, pre_norm_layers, with_windows

ARCHITECTURES = {"Qwen2ForCausalLM": Listing("Qwen2, Qwen2.5")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen2."""
    heads = attention(config, qkv_bias=True)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    mixers = with_windows(replace(heads, rope=rope.spec), sliding_windows(config))
    layers = pre_norm_layers(mixers, gated_mlp(config), norm)
    return llama_names(PRE_NORMS).describe(decoder(config, "qwen2", layers, norm, rope.max_positions))


def sliding_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Each layer's window: by `layer_types`, else the layers from `max_window_layers` on where windows are used."""
    use = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window", 4096) if use else None
    first = config.raw("max_window_layers")
    first = 28 if first is None else first
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise config.error("max_window_layers", "an integer of at least 0")
    return layer_windows(config, window, lambda i: window is not None and i >= first)
