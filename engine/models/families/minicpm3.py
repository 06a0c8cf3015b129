"""MiniCPM 3 (https://arxiv.org/abs/2404.06395): attention to latents, and multipliers for its depth and width."""

from __future__ import annotations

from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import NormSpec, ResidualBlockSpec
from .latent_parts import LATENT_NAMES, latent_attention, latent_refs
from .listing import Listing
from .names import llama_names
from .parts import decoder, gated_mlp, uniform_layers

ARCHITECTURES = {"MiniCPM3ForCausalLM": Listing("MiniCPM 3")}

_NAMES = llama_names({**LATENT_NAMES, "mlp_norm": "post_attention_layernorm"})


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """MiniCPM 3. A value head is as wide as the hidden size allows, if the config does not say."""
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_layers = uniform_layers(config)
    config = config.with_defaults(
        kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=max(1, hidden // num_heads)
    )
    if "q_lora_rank" not in config:
        config = config.with_fields(q_lora_rank=768)
    mixer, rope = latent_attention(config, max_model_len, interleaved=False)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    depth = config.optional_number("scale_depth", 1.4)
    scale = 1.0 if depth is None else depth / num_layers**0.5
    base = config.optional_integer("dim_model_base", 256)
    layer = (
        ResidualBlockSpec(mixer, norm, scale=scale),
        ResidualBlockSpec(gated_mlp(config, bias=config.flag("mlp_bias", False)), norm, scale=scale),
    )
    spec = decoder(
        config,
        "minicpm3",
        (layer,) * num_layers,
        norm,
        rope.max_positions,
        tied=True,
        embedding_scale=config.number("scale_emb", 12),
        divisor=1.0 if base is None else hidden / base,
    )
    return _NAMES.describe(spec, latent_refs(mixer))
