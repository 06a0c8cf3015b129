"""Gemma 3 (https://arxiv.org/abs/2503.19786), the models for text: Gemma 2 with two ropes and q and k norms."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from .gemma2 import NAMES, layer, mixers
from .listing import Listing
from .parts import decoder, layer_windows, rope_of_layer_type, with_windows

ARCHITECTURES = {
    "Gemma3ForCausalLM": Listing(
        "Gemma 3, the text models", refused="bidirectional attention, softcapped attention scores"
    ),
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Gemma 3. Where the config has no `layer_types`, every `sliding_window_pattern`th layer has no window."""
    config.refuse("attn_logit_softcapping")
    mixer, mlp, norm = mixers(config)
    mixer = replace(mixer, qk_norm=norm)
    every = config.integer("sliding_window_pattern", 6)
    windows = layer_windows(config, config.optional_integer("sliding_window", 4096), lambda i: (i + 1) % every != 0)
    full = rope_of_layer_type(config, "full_attention", "rope_theta", 1e6, mixer.head_dim, max_model_len)
    sliding = rope_of_layer_type(
        config, "sliding_attention", "rope_local_base_freq", 1e4, mixer.head_dim, max_model_len
    )
    attentions = [
        replace(attention, rope=(sliding if attention.sliding_window else full).spec)
        for attention in with_windows(mixer, windows)
    ]
    spec = decoder(
        config,
        "gemma3",
        tuple(layer(attention, mlp, norm) for attention in attentions),
        norm,
        # Linear scaling does not lengthen it once more: the config says what the model was trained for in the end.
        min(full.max_positions, sliding.max_positions, config.integer("max_position_embeddings")),
        tied=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        softcap=config.optional_number("final_logit_softcapping"),
    )
    return NAMES.describe(spec)
