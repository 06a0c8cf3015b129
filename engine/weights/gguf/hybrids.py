"""What GGUF files say of models with recurrent layers, in the words of config.json, and their tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from .fields import Fields
from .reader import GgufFile

_Config = dict[str, Any]

QWEN35_MODULES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
DELTA_NET_TENSORS = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
LFM2_MODULES = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
LFM2_TOP = {"model.embedding_norm.weight": "token_embd_norm.weight"}


def kv_heads(fields: Fields, default: int, num_layers: int) -> tuple[int, list[bool] | None]:
    """How many KV heads the layers with attention have, and which these are where the file says it.

    Raises ModelError for layers whose numbers differ.
    """
    key = "attention.head_count_kv"
    if not isinstance(fields.raw(key), np.ndarray):
        return fields.integer(key, default), None
    counts = fields.numbers(key, num_layers) or []
    attending = {int(count) for count in counts if count}
    if len(attending) != 1 or min(attending) < 0:
        raise fields.error(key, "one number for all layers with attention, and 0 for others")
    return attending.pop(), [bool(count) for count in counts]


def qwen35(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Qwen3.5's. Files hold value heads by their number within a key head, then by key head."""
    key_heads, value_heads = fields.integer("ssm.group_count"), fields.integer("ssm.time_step_rank")
    inner = fields.integer("ssm.inner_size")
    if inner % value_heads:
        raise fields.error("ssm.inner_size", f"a multiple of {value_heads} heads")
    if fields.optional_integer("nextn_predict_layers"):
        raise ModelError(f"{file.path} holds layers for multi-token prediction, which are not supported in GGUF files")
    return {
        "full_attention_interval": fields.integer("full_attention_interval", 4),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
        "linear_value_heads_tiled": True,
    }


def lfm2(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """LFM2's: layers without KV heads are convolutions."""
    num_layers = config["num_hidden_layers"]
    attending = kv_heads(fields, config["num_attention_heads"], num_layers)[1] or [True] * num_layers
    return {
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": fields.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if attends else "conv" for attends in attending],
    }


def log_of_decays(decays: NDArray[Any], origin: str) -> NDArray[np.float32]:
    """What a checkpoint calls A_log: files hold `-exp(A_log)`. Raises ModelError for numbers that are not below 0."""
    rates = -decays.astype(np.float32)
    if not ((rates > 0) & np.isfinite(rates)).all():
        raise ModelError(f"{origin} must hold numbers below 0")
    logs: NDArray[np.float32] = np.log(rates)
    return logs
