"""OLMo 2 (https://arxiv.org/abs/2501.00656): norms after the mixers only, q and k normalized over all heads."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec, ResidualBlockSpec
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, gated_mlp, uniform_layers

ARCHITECTURES = {"Olmo2ForCausalLM": Listing("OLMo 2")}

NAMES = llama_names({
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
})  # fmt: skip


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """OLMo 2."""
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    mixer = replace(heads, rope=rope.spec, qk_norm=norm, qk_norm_over="whole")
    layer = (ResidualBlockSpec(mixer, post_norm=norm), ResidualBlockSpec(gated_mlp(config), post_norm=norm))
    return NAMES.describe(decoder(config, "olmo2", (layer,) * uniform_layers(config), norm, rope.max_positions))
