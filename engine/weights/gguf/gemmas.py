"""What GGUF files say of Gemma's models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from ...errors import ModelError
from ...models.tensor_ref import TensorRef
from .config import ROPE_FACTORS, Config, ConfigFields, float32_vector, plain_heads
from .fields import Fields
from .names import SANDWICH_NORMS, TOP, has_qkv
from .reader import GgufFile

PER_LAYER_TOP = {
    **TOP,
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
GEMMA4 = {
    **SANDWICH_NORMS,
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
GEMMA3N = {
    **GEMMA4,
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
GEMMA3N_TENSORS = {"altup.correct_output_scale": "altup_correct_scale.weight"}
GEMMA4_TENSORS = {"layer_scalar": "layer_output_scale.weight"}
_STREAM = re.compile(r"(embed|final)\.stream\.(\d+)\.weight")
_SHARED = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
_NEVER_TURNS = 1e20  # frequencies are divided by this, or more


def gemma(layers_27b: int) -> ConfigFields:
    """Gemma 2 and 3. The 27B model has `layers_27b` layers, and scales queries by hidden size instead of head dim."""

    def fields_of(file: GgufFile, fields: Fields, config: Config) -> Config:
        is_27b = config["num_hidden_layers"] == layers_27b
        scalar = config["hidden_size"] / config["num_attention_heads"] if is_27b else config["head_dim"]
        given = {"query_pre_attn_scalar": scalar, "sliding_window": fields.integer("attention.sliding_window")}
        for name, key in (("attn_logit_softcapping",) * 2, ("final_logit_softcapping",) * 2):
            if (cap := fields.optional_number(key)) is not None:
                given[name] = cap
        return given

    return fields_of


def gemma3(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Gemma 3."""
    local = fields.optional_number("rope.freq_base_swa")
    pattern = fields.optional_integer("attention.sliding_window_pattern", 1)
    given = {"rope_local_base_freq": local, "sliding_window_pattern": pattern}
    # Its layers without a window have this base where the file is silent.
    theta = {"rope_theta": 1e6} if fields.raw("rope.freq_base") is None else {}
    return gemma(62)(file, fields, config) | theta | {name: value for name, value in given.items() if value is not None}


def stream_reference(name: str) -> TensorRef | None:
    """Where a weight of the streams is in a file, by Tidewheel's name; None for others."""
    found = _STREAM.fullmatch(name)
    if found is None:
        return None
    return TensorRef(f"{'altup_proj' if found[1] == 'embed' else 'altup_unembd_proj'}.weight", index=int(found[2]) - 1)


def gemma3n_heads(fields: Fields, config: Config) -> Config:
    """Gemma 3n's heads, and the widths of its MLPs, layer by layer."""
    widths = by_layer(fields, "feed_forward_length", config["num_hidden_layers"])
    return plain_heads(fields, config, widths[0]) | {"intermediate_size": widths}


def gemma3n(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Gemma 3n. Of gates that are cut off, files say by how many standard deviations."""
    layers, key = config["num_hidden_layers"], "activation_sparsity_scale"
    cutoffs = fields.raw(key)
    if not isinstance(cutoffs, np.ndarray) or len(cutoffs) != layers or np.isnan(cutoffs.astype(float)).any():
        raise fields.error(key, f"{layers} numbers, one for each layer")
    sliding = sliding_layers(fields, layers)
    table, laurel = file.tensors.get("per_layer_token_embd.weight"), file.tensors.get("blk.0.laurel_l.weight")
    local = fields.optional_number("rope.freq_base_swa")
    return {
        "activation_sparsity_pattern": [NormalDist().cdf(float(cutoff)) for cutoff in cutoffs],
        "altup_num_inputs": fields.integer("altup.num_inputs"),
        "altup_active_idx": fields.optional_integer("altup.active_idx") or 0,
        "hidden_size_per_layer_input": fields.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "laurel_rank": 64 if laurel is None else laurel.shape[0],
        "num_kv_shared_layers": fields.optional_integer("attention.shared_kv_layers") or 0,
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "rope_local_base_freq": 1e4 if local is None else local,
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping") or None,
    }


def gemma4_heads(fields: Fields, config: Config) -> Config:
    """Gemma 4's heads and MLPs, whose sizes may differ from layer to layer."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    sizes = {True: "_swa", False: ""}
    dims = {slides: fields.integer(f"attention.key_length{suffix}") for slides, suffix in sizes.items()}
    for slides, suffix in sizes.items():
        if fields.integer(f"attention.value_length{suffix}", dims[slides]) != dims[slides]:
            raise fields.error(f"attention.value_length{suffix}", f"that of the keys, {dims[slides]}")
    sliding = sliding_layers(fields, layers)
    counts = by_layer(fields, "attention.head_count_kv", layers)
    widths = by_layer(fields, "feed_forward_length", layers)
    shared = fields.optional_integer("attention.shared_kv_layers") or 0
    wide = widths[:-shared] + [width // 2 for width in widths[-shared:]] if shared else widths
    if len(set(widths)) > 1 and len(set(wide)) > 1:
        raise fields.error("feed_forward_length", "one width, or twice as much in layers that share K and V")
    return {
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len(set(widths)) > 1,
        "num_attention_heads": heads,
        "num_key_value_heads": counts[0],
        "head_dim": dims[True],
        "global_head_dim": dims[False],
        "per_layer_config": {
            str(i): {"head_dim": dims[slides], "num_key_value_heads": counts[i]} for i, slides in enumerate(sliding)
        },
        "num_kv_shared_layers": shared,
        "sliding_window": fields.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
    }


def gemma4_rope(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Gemma 4's. In layers without a window, the file's factors say which pairs turn: the first ones, as they are."""
    theta, local = fields.optional_number("rope.freq_base"), fields.optional_number("rope.freq_base_swa")
    full: Config = {"rope_type": "default", "rope_theta": 1e6 if theta is None else theta}
    if ROPE_FACTORS in file.tensors:
        factors = np.array(float32_vector(file.tensors[ROPE_FACTORS]))
        turning = int((factors == 1).sum())
        if 2 * len(factors) != config["global_head_dim"] or not (
            (factors[:turning] == 1).all() and (factors[turning:] >= _NEVER_TURNS).all()
        ):
            raise ModelError(f"{file.tensors[ROPE_FACTORS].origin} must have ones, then numbers that stop all turns")
        full |= {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}
    sliding: Config = {"rope_type": "default", "rope_theta": 1e4 if local is None else local}
    dim = fields.integer("rope.dimension_count_swa", config["head_dim"])
    if dim != config["head_dim"]:
        sliding["partial_rotary_factor"] = dim / config["head_dim"]
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def gemma4(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Gemma 4."""
    own = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    full = [i for i, kind in enumerate(config["layer_types"][:own]) if kind == "full_attention"]
    table = file.tensors.get("per_layer_token_embd.weight")
    experts = fields.optional_integer("expert_count") or 0
    routed = {
        "enable_moe_block": True,
        "num_experts": experts,
        "top_k_experts": fields.integer("expert_used_count", 1),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length", config["intermediate_size"]),
    }
    per_layer = fields.optional_integer("embedding_length_per_layer_input") or 0
    return (routed if experts else {}) | {
        # Files do not say it: all but E2B and E4B, which have embeddings for each layer.
        "use_bidirectional_attention": None if per_layer else "vision",
        "attention_k_eq_v": bool(full) and not has_qkv(file.tensors, full[0], "v"),
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping") or None,
    }


def shared_kv(layer: int, tensor: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor is for K and V that the layer does not use, because it reads another layer's."""
    return layer >= config["num_hidden_layers"] - config["num_kv_shared_layers"] and tensor in _SHARED


def sliding_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers have a window. Raises ModelError if the file does not say it of each."""
    key = "attention.sliding_window_pattern"
    slides = fields.raw(key)
    if not isinstance(slides, np.ndarray | list) or len(slides) != num_layers:
        raise fields.error(key, f"{num_layers} bools, one for each layer")
    return [bool(slide) for slide in slides]


def by_layer(fields: Fields, key: str, num_layers: int) -> list[int]:
    """Positive integers, one for each layer: the file has one for all, or as many as layers."""
    value: Any = fields.raw(key)
    if not isinstance(value, np.ndarray):
        return [fields.integer(key)] * num_layers
    numbers = fields.numbers(key, num_layers) or []
    if not all(0 < number < 2**31 for number in numbers):
        raise fields.error(key, "positive integers, one for each layer")
    return [int(number) for number in numbers]
