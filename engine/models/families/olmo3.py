"""OLMo 3 (https://allenai.org/blog/olmo3): OLMo 2 with windows in three of four layers, and YaRN only in the others."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import NormSpec, ResidualBlockSpec
from .listing import Listing
from .olmo2 import NAMES
from .parts import attention, decoder, gated_mlp, layer_windows, rope_of_layer_type, with_windows

ARCHITECTURES = {"Olmo3ForCausalLM": Listing("OLMo 3")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """OLMo 3."""
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    windows = layer_windows(config, config.optional_integer("sliding_window", 4096), lambda i: (i + 1) % 4 != 0)
    full, sliding = (
        rope_of_layer_type(config, layer_type, "rope_theta", 5e5, heads.head_dim, max_model_len)
        for layer_type in ("full_attention", "sliding_attention")
    )
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    mlp = ResidualBlockSpec(gated_mlp(config), post_norm=norm)
    layers = tuple(
        (ResidualBlockSpec(replace(mixer, rope=(sliding if mixer.sliding_window else full).spec), post_norm=norm), mlp)
        for mixer in with_windows(replace(heads, qk_norm=norm, qk_norm_over="whole"), windows)
    )
    longest = min(full.max_positions, sliding.max_positions, config.integer("max_position_embeddings"))
    return NAMES.describe(decoder(config, "olmo3", layers, norm, longest))
