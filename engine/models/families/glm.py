"""GLM-4 (https://arxiv.org/abs/2406.12793), dense: half of each head is rotated, in neighbouring pairs.

GLM-4-0414 (Glm4) has norms on both sides of each mixer.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec, ResidualBlockSpec
from .listing import Listing
from .names import PRE_NORMS, fused_rows, llama_names
from .parts import attention, decoder, gated_mlp, uniform_layers

ARCHITECTURES = {
    "GlmForCausalLM": Listing("GLM-4 9B, dense"),
    "Glm4ForCausalLM": Listing("GLM-4-0414, dense"),
}

_SANDWICH_NORMS = {
    **PRE_NORMS,
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """GLM-4. GGUF files of models that see images too have heads that are rotated in halves."""
    config = config.with_defaults(partial_rotary_factor=0.5)
    for name, default in (("num_key_value_heads", 2), ("head_dim", 128)):
        if name not in config:  # null is something else
            config = config.with_fields(**{name: default})
    heads = attention(config, qkv_bias=config.flag("attention_bias", True))
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    pairs = replace(rope.spec, interleaved=config.flag("rope_interleave", True))
    mixer, mlp = replace(heads, rope=pairs), gated_mlp(config)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1.5625e-07))
    sandwich = architecture == "Glm4ForCausalLM"
    layer = tuple(ResidualBlockSpec(part, norm, norm if sandwich else None) for part in (mixer, mlp))
    family = "glm4" if sandwich else "glm"
    spec = decoder(config, family, (layer,) * uniform_layers(config), norm, rope.max_positions)
    names = llama_names(_SANDWICH_NORMS if sandwich else PRE_NORMS)
    return names.describe(spec, fused_rows("mlp.gate_up_proj", gate=mlp.intermediate_size, up=mlp.intermediate_size))
