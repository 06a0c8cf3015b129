"""Phi-3, Phi-3.5 and Phi-4 (https://arxiv.org/abs/2404.14219), dense: Llama with fused matrices, mostly with LongRoPE.

Phi-4-mini rotates a part of each head.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .listing import Listing
from .names import PRE_NORMS, fused_rows, llama_names
from .parts import attention, decoder, gated_mlp, pre_norm_layers, uniform_layers

_MULTIMODAL = ("Phi3VForCausalLM", "Phi4MMForCausalLM", "Phi4MultimodalForCausalLM")
ARCHITECTURES = {
    "Phi3ForCausalLM": Listing("Phi-3, Phi-3.5 and Phi-4, dense, text only", refused="biases"),
    "Phi3VForCausalLM": Listing("Phi-3-vision and Phi-3.5-vision"),
    **dict.fromkeys(
        _MULTIMODAL[1:], Listing("Phi-4-multimodal: its text part, without the adapters for images and sound")
    ),
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Phi-3."""
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    heads = attention(config)
    rope_config = _with_longrope(config).with_defaults(original_max_position_embeddings=4096)
    rope = rope_from_config(rope_config, heads.head_dim, max_model_len)
    window = config.optional_integer("sliding_window")
    num_layers = uniform_layers(config, "full_attention" if window is None else "sliding_attention")
    norm, mlp = NormSpec("rms", config.number("rms_norm_eps", 1e-5)), gated_mlp(config)
    mixer = replace(heads, rope=rope.spec, sliding_window=window)
    spec = decoder(config, "phi3", pre_norm_layers([mixer] * num_layers, mlp, norm), norm, rope.max_positions)
    fused = fused_rows("self_attn.qkv_proj", q=heads.q_size, k=heads.kv_size, v=heads.kv_size)
    fused |= fused_rows("mlp.gate_up_proj", gate=mlp.intermediate_size, up=mlp.intermediate_size)
    return replace(llama_names(PRE_NORMS).describe(spec, fused), text_part=architecture in _MULTIMODAL)


def _with_longrope(config: ConfigReader) -> ConfigReader:
    """Early configs say su or yarn and mean longrope."""
    for name in ("rope_scaling", "rope_parameters"):
        value = config.raw(name)
        if isinstance(value, dict):
            renamed = {
                key: "longrope" if key in ("type", "rope_type") and kind in ("su", "yarn") else kind
                for key, kind in value.items()
            }
            config = config.with_fields(**{name: renamed})
    return config
