"""EXAONE 4 (https://arxiv.org/abs/2507.11407): norms after the mixers only, q and k normalized by head.

The 32B model has windows in three of four layers; the others know no positions (NoPE).
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec, ResidualBlockSpec
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, gated_mlp, layer_windows, with_windows

ARCHITECTURES = {"Exaone4ForCausalLM": Listing("EXAONE 4")}

_NAMES = llama_names({
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
})  # fmt: skip


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """EXAONE 4. Where no windows are in use, all layers are rotated."""
    config = config.with_defaults(num_key_value_heads=32)
    heads = attention(config)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    window = config.optional_integer("sliding_window", 4096)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    mlp = ResidualBlockSpec(gated_mlp(config), post_norm=norm)
    layers = tuple(
        (
            ResidualBlockSpec(
                replace(mixer, rope=rope.spec if window is None or mixer.sliding_window else None), post_norm=norm
            ),
            mlp,
        )
        for mixer in with_windows(replace(heads, qk_norm=norm), _windows(config, window))
    )
    return _NAMES.describe(decoder(config, "exaone4", layers, norm, rope.max_positions))


def _windows(config: ConfigReader, window: int | None) -> tuple[int | None, ...]:
    """By `layer_types`, else by letters (L has a window, G has none), else by n: each n-th layer has none."""
    pattern = config.raw("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        last = config.num_layers("num_hidden_layers") - 1
        return layer_windows(config, window, lambda i: pattern[i % len(pattern)] == "L" and i != last)
    every = 1 if window is None else config.integer("sliding_window_pattern", 4)
    return layer_windows(config, window, lambda i: (i + 1) % every != 0)
