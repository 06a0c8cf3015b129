"""What families with attention to latents share: DeepSeek V2 and its successors."""

from __future__ import annotations

import math
from dataclasses import replace

from ..config import ConfigReader
from ..rope import Rope, rope_from_config
from ..spec import LatentAttentionSpec, NormSpec
from ..tensor_ref import TensorRef
from .parts import MAX_HEAD_DIM

_MAX_RANK = 2**20
_NORM = NormSpec("rms", 1e-6)  # of latents, whatever the config says of other norms

LATENT_NAMES = {
    "latent_attention_norm": "input_layernorm",
    "latent_q": "self_attn.q_proj",
    "latent_q_down": "self_attn.q_a_proj",
    "latent_q_norm": "self_attn.q_a_layernorm",
    "latent_q_up": "self_attn.q_b_proj",
    "latent_kv_down": "self_attn.kv_a_proj_with_mqa",
    "latent_kv_norm": "self_attn.kv_a_layernorm",
    "latent_o": "self_attn.o_proj",
}
"""The names in checkpoints, without the matrix that `latent_refs` divides."""


def latent_attention(
    config: ConfigReader, max_model_len: int | None, *, interleaved: bool, norm: NormSpec = _NORM
) -> tuple[LatentAttentionSpec, Rope]:
    """The attention of all layers, and its rope. Raises ModelError for sizes that no attention has."""
    num_heads = config.integer("num_attention_heads")
    if config.integer("num_key_value_heads", num_heads) != num_heads:
        raise config.error("num_key_value_heads", f"num_attention_heads, {num_heads}: a latent is for all heads")
    nope_dim, rope_dim, value_dim = (
        config.integer(name, default)
        for name, default in (("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64), ("v_head_dim", 128))
    )
    kv_rank, q_rank = config.integer("kv_lora_rank", 512), config.optional_integer("q_lora_rank", 1536)
    for name, size, most in (
        ("qk_nope_head_dim", nope_dim, MAX_HEAD_DIM),
        ("qk_rope_head_dim", rope_dim, MAX_HEAD_DIM),
        ("v_head_dim", value_dim, MAX_HEAD_DIM),
        ("kv_lora_rank", kv_rank, _MAX_RANK),
        ("q_lora_rank", q_rank or 1, _MAX_RANK),
    ):
        if size > most:
            raise config.error(name, f"at most {most}")
    rope = rope_from_config(config.with_fields(partial_rotary_factor=None), rope_dim, max_model_len)
    return (
        LatentAttentionSpec(
            num_heads=num_heads,
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=value_dim,
            kv_rank=kv_rank,
            scale=(nope_dim + rope_dim) ** -0.5 * _sharpness(config),
            rope=replace(rope.spec, interleaved=interleaved),
            norm=norm,
            q_rank=q_rank,
            bias=config.flag("attention_bias", False),
        ),
        rope,
    )


def latent_refs(attention: LatentAttentionSpec) -> dict[str, TensorRef]:
    """k_up and v_up: one matrix has, for each head, the rows of its keys and then the rows of its values."""
    nope, size = attention.nope_dim, attention.nope_dim + attention.value_dim
    name = "self_attn.kv_b_proj"
    return {
        "latent_k_up": TensorRef(name, each=(size, 0, nope), transpose_each=(nope, attention.kv_rank)),
        "latent_v_up": TensorRef(name, each=(size, nope, size)),
    }


def _sharpness(config: ConfigReader) -> float:
    """The factor of the scores by YaRN's `mscale_all_dim`: the square of `0.1 * mscale_all_dim * ln(factor) + 1`."""
    for name in ("rope_scaling", "rope_parameters"):
        value = config.raw(name)
        if isinstance(value, dict) and (value.get("rope_type") or value.get("type") or "default") != "default":
            scaling = ConfigReader(value, "config.json: rope parameters")
            if not scaling.raw("mscale_all_dim"):
                return 1.0
            factor = scaling.number("factor")
            return (0.1 * scaling.number("mscale_all_dim") * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
    return 1.0
