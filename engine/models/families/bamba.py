"""Bamba (https://huggingface.co/blog/bamba): Mamba2 layers, attention with half of each head turned in some of them."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import MixerSpec, NormSpec, ResidualBlockSpec
from .listing import Listing
from .mamba_parts import bamba_mixer, mamba_refs
from .names import llama_names
from .parts import attention, decoder, gated_mlp

ARCHITECTURES = {"BambaForCausalLM": Listing("Bamba")}

_MODULES = {
    "attention_norm": "input_layernorm",
    "mamba2_norm": "input_layernorm",
    "mlp_norm": "pre_ff_layernorm",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Bamba."""
    bias = config.flag("attention_bias", False)
    if "num_key_value_heads" not in config:
        config = config.with_fields(num_key_value_heads=8)  # null is as many as query heads
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    turning = config.with_defaults(partial_rotary_factor=0.5, max_position_embeddings=262144)
    rope = rope_from_config(turning, heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    mamba = bamba_mixer(config, norm)
    mixers: dict[bool, MixerSpec] = {False: mamba, True: replace(heads, rope=rope.spec)}
    mlp = ResidualBlockSpec(gated_mlp(config, bias=config.flag("mlp_bias", False)), norm)
    layers = tuple((ResidualBlockSpec(mixers[attends], norm), mlp) for attends in _attending(config))
    names = llama_names(_MODULES)
    names = replace(names, top={**names.top, "final_norm.weight": "final_layernorm.weight"})
    return names.describe(decoder(config, "bamba", layers, norm, rope.max_positions), mamba_refs(mamba, "mamba"))


def _attending(config: ConfigReader) -> list[bool]:
    indices = config.raw("attn_layer_indices")
    if indices is not None and (not isinstance(indices, list) or any(type(i) is not int or i < 0 for i in indices)):
        raise config.error("attn_layer_indices", "a list of the numbers of layers")
    return [i in (indices or ()) for i in range(config.num_layers("num_hidden_layers"))]
