"""Experts in GGUF files: their settings, and the names and places of their weights.

The keys and names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from ...models.tensor_ref import TensorRef
from .fields import Fields
from .names import has_qkv
from .reader import GgufFile

_Config = dict[str, Any]

# From Tidewheel's names, because files hold the experts of all families in the same way.
_EXPERT = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(gate|up|down)\.(weight|bias)")
_MODULE = re.compile(r"layers\.(\d+)\.(.+)")
_MODULES = {
    "router.weight": "ffn_gate_inp.weight",
    "router.bias": "ffn_gate_inp.bias",
    "router.correction_bias": "exp_probs_b.bias",
    "router_norm.weight": "ffn_gate_inp.scale",
    "router.expert_scales": "ffn_down_exps.scale",
    "shared.gate.weight": "ffn_gate_shexp.weight",
    "shared.up.weight": "ffn_up_shexp.weight",
    "shared.down.weight": "ffn_down_shexp.weight",
    "shared_gate.weight": "ffn_gate_inp_shexp.weight",
    "sinks": "attn_sinks.weight",
}
SOFTMAX, SIGMOID = 1, 2  # of expert_gating_func
_MAVERICK_EXPERTS = 128
_PHIMOE_SCALE = 1.243163121016122  # short_mscale and long_mscale of its config.json


def expert_reference(name: str, shape: tuple[int, ...], stored: Collection[str]) -> TensorRef | None:
    """Where a weight of experts, of their router or of sinks is in a file, by Tidewheel's name; None for others.

    A tensor has all experts' matrices, one after the other. `stored` are the names of all tensors: some files have gate
    and up in one, with the rows of up behind those of the gate.
    """
    if found := _EXPERT.fullmatch(name):
        fused = f"blk.{found[1]}.ffn_gate_up_exps.{found[4]}"
        if found[3] != "down" and fused in stored:
            start = 0 if found[3] == "gate" else shape[0]
            return TensorRef(fused, index=int(found[2]), rows=(start, start + shape[0]))
        return TensorRef(f"blk.{found[1]}.ffn_{found[3]}_exps.{found[4]}", index=int(found[2]))
    found = _MODULE.fullmatch(name)
    if found is None or found[2] not in _MODULES:
        return None
    return TensorRef(f"blk.{found[1]}.{_MODULES[found[2]]}")


def _counts(fields: Fields, count: str, per_token: str = "num_experts_per_tok") -> _Config:
    return {count: fields.integer("expert_count"), per_token: fields.integer("expert_used_count")}


def _expert_size(fields: Fields, config: _Config) -> int:
    return fields.integer("expert_feed_forward_length", config["intermediate_size"])


def mixtral(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Mixtral."""
    return _counts(fields, "num_local_experts")


def phimoe(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Phi-3.5-MoE. How near experts are mixed files do not say: it is the same in all models. Of LongRoPE they say
    Phi-3's scale, and not the one that this model has.
    """
    rope = config.get("rope_scaling")
    if rope and rope.get("rope_type") == "longrope":
        rope = {**rope, "attention_factor": _PHIMOE_SCALE}
    return _counts(fields, "num_local_experts") | {
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "lm_head_bias": "output.bias" in file.tensors,
        "rope_scaling": rope,
    }


def qwen2_moe(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Qwen2-MoE."""
    return _counts(fields, "num_experts") | {
        "moe_intermediate_size": _expert_size(fields, config),
        "shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
    }


def qwen3_moe(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Qwen3-MoE, whose weights are normalized where the file is silent."""
    return _counts(fields, "num_experts") | {
        "moe_intermediate_size": _expert_size(fields, config),
        "norm_topk_prob": fields.flag("expert_weights_norm", True),
    }


def olmoe(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """OLMoE."""
    return _counts(fields, "num_experts") | {"clip_qkv": fields.optional_number("attention.clamp_kqv") or None}


def gpt_oss(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """gpt-oss. Its authors' rope has no rounded bounds; files do not say that."""
    rope = config.get("rope_scaling")
    return _counts(fields, "num_local_experts") | {
        "intermediate_size": _expert_size(fields, config),
        "sliding_window": fields.integer("attention.sliding_window"),
        "rope_scaling": rope and {**rope, "truncate": False},
    }


def has_shared_expert(fields: Fields) -> bool:
    """Whether a file has an MLP beside the experts."""
    return bool(fields.optional_integer("expert_shared_feed_forward_length"))


def drafts(fields: Fields, config: _Config) -> _Config:
    """How many layers there are without those for drafts, which are counted too and come last."""
    count = fields.optional_integer("nextn_predict_layers") or 0
    if count >= config["num_hidden_layers"]:
        raise fields.error("nextn_predict_layers", "less than block_count")
    return {"num_hidden_layers": config["num_hidden_layers"] - count, "num_nextn_predict_layers": count}


def grouped(fields: Fields, config: _Config, *, normalizes: bool) -> _Config:
    """Experts like DeepSeek's and GLM's: groups of them are chosen first, one is shared, and there are draft layers.

    `normalizes`: whether weights are normalized where the file is silent.
    """
    scale = fields.optional_number("expert_weights_scale")
    return {
        **drafts(fields, config),
        **_counts(fields, "n_routed_experts"),
        "moe_intermediate_size": _expert_size(fields, config),
        "n_shared_experts": fields.optional_integer("expert_shared_count") or 0,
        "n_group": fields.integer("expert_group_count", 1),
        "topk_group": fields.integer("expert_group_used_count", 1),
        "routed_scaling_factor": scale or 1.0,
        "norm_topk_prob": fields.flag("expert_weights_norm", normalizes),
        "first_k_dense_replace": fields.optional_integer("leading_dense_block_count") or 0,
    }


def require_sigmoids(fields: Fields) -> None:
    """Raises ModelError for a router of other scores."""
    if fields.optional_integer("expert_gating_func") not in (None, SIGMOID):
        raise fields.error("expert_gating_func", f"{SIGMOID}, the sigmoid")


def glm4_moe(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """GLM-4 with experts."""
    require_sigmoids(fields)
    return grouped(fields, config, normalizes=True) | {
        "attention_bias": has_qkv(file.tensors, 0, "q", "bias"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def ernie4_5_moe(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """ERNIE 4.5 with experts."""
    return _counts(fields, "moe_num_experts", "moe_k") | {
        "moe_intermediate_size": _expert_size(fields, config),
        "moe_num_shared_experts": fields.optional_integer("expert_shared_count") or 0,
        "moe_layer_start_index": fields.optional_integer("leading_dense_block_count") or 0,
        "moe_layer_interval": fields.integer("interleave_moe_layer_step", 1),
    }


def hunyuan_moe(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Hunyuan with experts, which are as large as the shared one."""
    size = _expert_size(fields, config)
    if fields.integer("expert_shared_feed_forward_length", size) != size:
        raise fields.error("expert_shared_feed_forward_length", f"that of other experts, {size}")
    return _counts(fields, "num_experts", "moe_topk") | {
        "intermediate_size": size,
        "num_shared_expert": fields.integer("expert_shared_count", 1),
        "attention_bias": has_qkv(file.tensors, 0, "q", "bias"),
    }


def llama4(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Llama 4. Files do not have the length of its chunks and its temperatures: all models have the same."""
    if fields.optional_integer("attention.sliding_window") == 0:
        raise fields.error("attention.sliding_window", "above 0: models without chunks are not supported")
    counts = _counts(fields, "num_local_experts")
    return counts | {
        "intermediate_size": _expert_size(fields, config),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": fields.integer("interleave_moe_layer_step", 1),
        # As llama.cpp tells Scout, which normalizes queries and keys, from Maverick.
        "use_qk_norm": counts["num_local_experts"] != _MAVERICK_EXPERTS,
    }
