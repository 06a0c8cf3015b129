"""Falcon-H1 (https://arxiv.org/abs/2507.22448): attention and Mamba2 side by side in every layer, with multipliers."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import AttentionSpec, Mamba2Spec, NormSpec, ParallelSpec, ResidualBlockSpec
from .listing import Listing
from .mamba_parts import bamba_mixer, mamba_refs
from .names import llama_names
from .parts import attention, decoder, gated_mlp

ARCHITECTURES = {"FalconH1ForCausalLM": Listing("Falcon-H1")}

_MODULES = {
    "parallel_norm": "input_layernorm",
    "mlp_norm": "pre_ff_layernorm",
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Falcon-H1. A multiplier of what is linear is a scale of the residual block or of the attention scores."""
    heads, attention_scale = _attention(config.with_defaults(num_key_value_heads=8))
    rope = rope_from_config(config.with_defaults(max_position_embeddings=8192), heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    mamba = _mamba(config, norm)
    gate_scale, mlp_scale = _multipliers(config, "mlp_multipliers", 2)
    both = ParallelSpec(
        (
            ResidualBlockSpec(mamba, scale=config.number("ssm_out_multiplier", 1.0)),
            ResidualBlockSpec(replace(heads, rope=rope.spec), scale=attention_scale),
        )
    )
    mlp = replace(gated_mlp(config, bias=config.flag("mlp_bias", False)), gate_scale=gate_scale)
    layer = (ResidualBlockSpec(both, norm), ResidualBlockSpec(mlp, norm, scale=mlp_scale))
    spec = decoder(
        config,
        "falcon_h1",
        (layer,) * config.num_layers("num_hidden_layers"),
        norm,
        rope.max_positions,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        divisor=1 / config.number("lm_head_multiplier", 1.0),
    )
    names = llama_names(_MODULES)
    names = replace(names, top={**names.top, "final_norm.weight": "final_layernorm.weight"})
    return names.describe(spec, mamba_refs(mamba, "mamba"))


def _attention(config: ConfigReader) -> tuple[AttentionSpec, float]:
    """Attention, and the scale of its residual block."""
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    if bias:  # what they are added to is multiplied by it, and they are not
        config.refuse("attention_in_multiplier", 1)
    inputs, keys = config.number("attention_in_multiplier", 1.0), config.number("key_multiplier", 1.0)
    # Queries, keys and values are multiplied by that of the inputs.
    scores = heads.scale * keys * inputs * inputs
    return replace(heads, scale=scores), config.number("attention_out_multiplier", 1.0) * inputs


def _mamba(config: ConfigReader, norm: NormSpec) -> Mamba2Spec:
    size = config.optional_integer("mamba_d_ssm", 1024)
    mamba = bamba_mixer(config, norm if config.flag("mamba_rms_norm", False) else None, size)
    if config.flag("projectors_bias", False) != mamba.bias:
        raise config.error("projectors_bias", f"{str(mamba.bias).lower()}, as mamba_proj_bias is")
    if mamba.bias:
        config.refuse("ssm_in_multiplier", 1)
    inputs = config.number("ssm_in_multiplier", 1.0)
    z, x, b, c, dt = _multipliers(config, "ssm_multipliers", 5)
    return replace(
        mamba,
        gate="last" if config.flag("mamba_norm_before_gate", True) else "first",
        input_scales=(inputs * z, inputs * x, inputs * b, inputs * c, inputs * dt),
    )


def _multipliers(config: ConfigReader, name: str, count: int) -> list[float]:
    values = config.raw(name)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise config.error(name, f"a list of {count} numbers")
    return [ConfigReader({name: value}).number(name) for value in values]
