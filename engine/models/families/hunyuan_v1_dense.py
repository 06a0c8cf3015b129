"""Hunyuan, dense (https://github.com/Tencent-Hunyuan): Llama that normalizes queries and keys after rope."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, pre_norm_layers, uniform_layers

ARCHITECTURES = {
    "HunYuanDenseV1ForCausalLM": Listing("Hunyuan, dense", refused="K and V shared by layers (`use_cla`)"),
}

HUNYUAN_QK_NORMS = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
_NAMES = llama_names({**PRE_NORMS, **HUNYUAN_QK_NORMS})


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Hunyuan. K and V that layers share (CLA) are refused."""
    config.refuse("use_qk_norm", True)
    config.refuse("use_cla", False)
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(with_stretched_base(config, heads.head_dim), heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    mixer = replace(heads, rope=rope.spec, qk_norm=norm, qk_norm_after_rope=True)
    layers = pre_norm_layers([mixer] * uniform_layers(config), gated_mlp(config), norm)
    return _NAMES.describe(decoder(config, "hunyuan_v1_dense", layers, norm, rope.max_positions))


def with_stretched_base(config: ConfigReader, head_dim: int) -> ConfigReader:
    """Its rope type "dynamic" with an `alpha` is a theta of `theta * alpha ** (d / (d - 2))`, at any length."""
    for name in ("rope_scaling", "rope_parameters"):
        parameters = config.raw(name)
        if not isinstance(parameters, dict) or not parameters.get("alpha") or head_dim <= 2:
            continue
        if "dynamic" not in (parameters.get("rope_type"), parameters.get("type")):
            continue
        fields = ConfigReader(parameters, f"config.json: {name}")
        source = fields if fields.raw("rope_theta") is not None else config
        theta, alpha = source.number("rope_theta", 10000.0), fields.number("alpha")
        stretched = theta * alpha ** (head_dim / (head_dim - 2))
        return config.with_fields(**{name: None, "rope_theta": stretched})
    return config
