"""ERNIE 4.5 (https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf), dense.

Llama with heads that are rotated in neighbouring pairs.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, pre_norm_layers, uniform_layers

ARCHITECTURES = {"Ernie4_5ForCausalLM": Listing("ERNIE 4.5, dense")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """ERNIE 4.5."""
    for name, default in (("num_key_value_heads", 2), ("head_dim", 128)):
        if name not in config:  # null is something else
            config = config.with_fields(**{name: default})
    bias = config.flag("use_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config.with_defaults(rope_theta=5e5), heads.head_dim, max_model_len)
    mixer = replace(heads, rope=replace(rope.spec, interleaved=True))
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    layers = pre_norm_layers([mixer] * uniform_layers(config), gated_mlp(config, bias=bias), norm)
    return llama_names(PRE_NORMS).describe(decoder(config, "ernie4_5", layers, norm, rope.max_positions, tied=True))
