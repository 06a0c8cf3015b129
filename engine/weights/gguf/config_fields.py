"""What the config of one architecture has beside the fields of all: from the metadata and tensors of its GGUF files."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import ModelError
from .fields import Fields
from .reader import GgufFile

Config = dict[str, Any]

_STARCODER2_WINDOW = 4096  # of all its models; their files do not say


def _has(file: GgufFile, tensor: str) -> bool:
    return f"blk.0.{tensor}" in file.tensors


def _rotated(fields: Fields, config: Config) -> float:
    """How much of a head is rotated."""
    part: float = fields.integer("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    return part


def _layer_types(fields: Fields, config: Config) -> Config:
    """Window and layer types, where the file has a window and says for each layer whether it is used."""
    window = fields.optional_integer("attention.sliding_window")
    if not window:
        return {"sliding_window": None}
    key = "attention.sliding_window_pattern"
    slides = fields.raw(key)
    if not isinstance(slides, np.ndarray | list) or len(slides) != config["num_hidden_layers"]:
        raise fields.error(key, f"{config['num_hidden_layers']} bools, one for each layer")
    types = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return {"sliding_window": window, "layer_types": types}


def olmo2(file: GgufFile, fields: Fields, config: Config) -> Config:
    """OLMo 2. The files of OLMo 3 have its architecture's name and a window."""
    if fields.optional_integer("attention.sliding_window"):
        raise ModelError(f"{file.path}: OLMo 3 in GGUF is not supported: serve its safetensors checkpoint")
    return {}


def exaone4(file: GgufFile, fields: Fields, config: Config) -> Config:
    """EXAONE 4."""
    return _layer_types(fields, config)


def stablelm(file: GgufFile, fields: Fields, config: Config) -> Config:
    """StableLM."""
    return {
        "use_qkv_bias": _has(file, "attn_q.bias"),
        "use_parallel_residual": not _has(file, "ffn_norm.weight"),
        "partial_rotary_factor": _rotated(fields, config),
    }


def starcoder2(file: GgufFile, fields: Fields, config: Config) -> Config:
    """StarCoder 2."""
    window = fields.optional_integer("attention.sliding_window", 1) or _STARCODER2_WINDOW
    return {"use_bias": _has(file, "attn_q.bias"), "sliding_window": window}


def phi2(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Phi-1 and Phi-2."""
    return {"partial_rotary_factor": _rotated(fields, config)}


def glm4(file: GgufFile, fields: Fields, config: Config) -> Config:
    """GLM-4-0414."""
    return {"partial_rotary_factor": _rotated(fields, config), "attention_bias": _has(file, "attn_q.bias")}


def ernie(file: GgufFile, fields: Fields, config: Config) -> Config:
    """ERNIE 4.5."""
    return {"use_bias": _has(file, "attn_q.bias")}


def hunyuan(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Hunyuan. The base of its rope is stretched in the file already."""
    return {"attention_bias": _has(file, "attn_q.bias")}


def command_r(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Command R."""
    return {"logit_scale": fields.number("logit_scale"), "attention_bias": _has(file, "attn_q.bias")}


def cohere2(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Command R7B and Command A."""
    window = fields.integer("attention.sliding_window")
    return {**command_r(file, fields, config), "sliding_window": window}


def ministral3(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Ministral 3. Its YaRN does not scale what is rotated."""
    rope = dict(config.get("rope_scaling") or {})
    if fields.optional_number("rope.scaling.yarn_log_multiplier") not in (None, 1.0):
        raise fields.error("rope.scaling.yarn_log_multiplier", "1")
    if rope:
        rope["attention_factor"] = 1.0
    if (beta := fields.optional_number("attention.temperature_scale")) is not None:
        rope["llama_4_scaling_beta"] = beta
    return {"rope_scaling": rope or {"rope_type": "default"}}


def gpt2(file: GgufFile, fields: Fields, config: Config) -> Config:
    """GPT-2, and StarCoder, which has the same words."""
    return {
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_layer": config["num_hidden_layers"],
        "n_positions": config["max_position_embeddings"],
        "n_inner": config["intermediate_size"],
        "multi_query": config["num_key_value_heads"] == 1,
    }


def gptneox(file: GgufFile, fields: Fields, config: Config) -> Config:
    """GPT-NeoX."""
    return {
        "rotary_pct": _rotated(fields, config),
        "rotary_emb_base": config["rope_theta"],
        "use_parallel_residual": fields.flag("use_parallel_residual", True),
        "attention_bias": _has(file, "attn_qkv.bias"),
    }


def falcon(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Falcon. One KV head is the first architecture, several are the new one."""
    heads = config["num_key_value_heads"]
    return {
        "new_decoder_architecture": heads > 1,
        "multi_query": heads == 1,
        "num_kv_heads": heads,
        "num_ln_in_parallel_attn": 2 if _has(file, "attn_norm_2.weight") else 1,
        "ffn_hidden_size": config["intermediate_size"],
        "bias": _has(file, "attn_qkv.bias"),
    }


def bloom(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Bloom."""
    return {"seq_length": config["max_position_embeddings"]}


def mpt(file: GgufFile, fields: Fields, config: Config) -> Config:
    """MPT."""
    options = {
        "alibi_bias_max": fields.optional_number("attention.max_alibi_bias") or None,
        "clip_qkv": fields.optional_number("attention.clamp_kqv"),
    }
    return {
        "d_model": config["hidden_size"],
        "n_heads": config["num_attention_heads"],
        "n_layers": config["num_hidden_layers"],
        "max_seq_len": config["max_position_embeddings"],
        # A bias of none at all is what files of models without ALiBi have.
        "attn_config": {"alibi": options["alibi_bias_max"] is not None, **options},
    }
