"""Attention to latents in GGUF files: DeepSeek's, models of its design, and MiniCPM 3's."""

from __future__ import annotations

from ...errors import ModelError
from .config import Config, plain_rope
from .experts import SIGMOID, SOFTMAX, grouped
from .fields import Fields
from .names import PRE_NORMS
from .reader import GgufFile

LATENTS = {
    **PRE_NORMS,
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
# As newer files divide attn_kv_b.
UPS = {"latent_k_up.weight": "attn_k_b.weight", "latent_v_up.weight": "attn_v_b.weight"}
_GLM_FLASH = {(layers, 154_880) for layers in (47, 48)}  # its files may not say that they take the sigmoid


def latent_heads(fields: Fields, config: Config) -> Config:
    """The sizes of heads and latents. Newer files have the sizes of heads under other names."""
    heads, rope_dim = config["num_attention_heads"], fields.integer("rope.dimension_count")
    key_dim = fields.optional_integer("attention.key_length_mla", 1) or fields.integer("attention.key_length")
    if key_dim <= rope_dim:
        raise fields.error("rope.dimension_count", f"less than the {key_dim} numbers of a key")
    value_dim = fields.optional_integer("attention.value_length_mla", 1)
    if value_dim is None:
        value_dim = fields.integer("attention.value_length", max(config["hidden_size"] // heads, 1))
    return {
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_key_value_heads": heads,
        "head_dim": rope_dim,  # the only part for rope
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": value_dim,
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "q_lora_rank": fields.optional_integer("attention.q_lora_rank") or None,
        "rope_interleave": True,
    }


def deepseek_rope(file: GgufFile, fields: Fields, config: Config) -> Config:
    """DeepSeek's: YaRN sharpens the scores instead of what is rotated. The logarithm is multiplied by a tenth of it."""
    rope = plain_rope(file, fields, config)
    scaling, sharpness = rope.get("rope_scaling"), fields.optional_number("rope.scaling.yarn_log_multiplier")
    if scaling and scaling["rope_type"] == "yarn" and sharpness:
        rope["rope_scaling"] = scaling | {"mscale": 10 * sharpness, "mscale_all_dim": 10 * sharpness}
    return rope


def takes_sigmoids(fields: Fields) -> bool:
    """Whether experts are chosen by sigmoids, as since DeepSeek V3."""
    if (scores := fields.optional_integer("expert_gating_func")) is not None:
        return scores == SIGMOID
    return (fields.optional_integer("block_count"), fields.optional_integer("vocab_size")) in _GLM_FLASH


def takes_softmax(fields: Fields) -> bool:
    """Whether experts are chosen by the softmax, as in DeepSeek V2."""
    return not takes_sigmoids(fields)


def deepseek_v2(file: GgufFile, fields: Fields, config: Config) -> Config:
    """DeepSeek V2. Where the file has groups, a group is as good as its best expert."""
    if fields.optional_integer("expert_gating_func") not in (None, SOFTMAX):
        raise fields.error("expert_gating_func", f"{SOFTMAX}, the softmax, or {SIGMOID}, the sigmoid")
    experts = grouped(fields, config, normalizes=False)
    return experts | {"topk_method": "group_limited_greedy" if experts["n_group"] > 1 else "greedy"}


def deepseek_v3(file: GgufFile, fields: Fields, config: Config) -> Config:
    """DeepSeek V3, Kimi K2 and GLM-4.7-Flash."""
    if fields.optional_number("attention.temperature_scale"):
        raise ModelError(f"{file.path}: temperatures by position (attention.temperature_scale) are not supported here")
    return grouped(fields, config, normalizes=False)
