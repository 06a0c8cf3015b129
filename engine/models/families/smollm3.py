"""SmolLM3 (https://huggingface.co/blog/smollm3): Llama in which every fourth layer knows no positions (NoPE)."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, layer_windows, pre_norm_layers, with_windows

ARCHITECTURES = {"SmolLM3ForCausalLM": Listing("SmolLM3")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """SmolLM3. Where windows are used and the config has no `layer_types`, the layers without rope slide."""
    if "num_key_value_heads" not in config:
        config = config.with_fields(num_key_value_heads=4)  # null is as many as query heads
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config.with_defaults(rope_theta=2e6), heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    has_rope = layers_with_rope(config)
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window", False) else None
    windows = layer_windows(config, window, lambda i: window is not None and not has_rope[i])
    mixers = [
        replace(mixer, rope=rope.spec if rotated else None)
        for mixer, rotated in zip(with_windows(heads, windows), has_rope, strict=True)
    ]
    layers = pre_norm_layers(mixers, gated_mlp(config, bias=config.flag("mlp_bias", False)), norm)
    return llama_names(PRE_NORMS).describe(decoder(config, "smollm3", layers, norm, rope.max_positions, tied=True))


def layers_with_rope(config: ConfigReader) -> list[bool]:
    """Which layers have rope. `no_rope_layers`, despite its name, has a 1 for each that does."""
    num_layers, flags = config.num_layers("num_hidden_layers"), config.raw("no_rope_layers")
    if flags is None:
        every = config.integer("no_rope_layer_interval", 4)
        return [(i + 1) % every != 0 for i in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise config.error("no_rope_layers", f"a list of {num_layers} entries, each 0 or 1")
    return [bool(flag) for flag in flags]
