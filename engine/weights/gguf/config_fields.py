"""What the config of one architecture has beside the fields of all: from the metadata and tensors of its GGUF files."""

from __future__ import annotations

from . import experts, hybrids
from .config import Config
from .fields import Fields
from .gemmas import sliding_layers
from .names import has_qkv
from .reader import GgufFile

_STARCODER2_WINDOW = 4096  # of all its models; their files do not say


def _has(file: GgufFile, tensor: str) -> bool:
    return f"blk.0.{tensor}" in file.tensors


def _rotated(fields: Fields, config: Config) -> float:
    """How much of a head is rotated."""
    part: float = fields.integer("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    return part


def _layer_types(fields: Fields, config: Config) -> Config:
    """Window and layer types, where the file has a window and says for each layer whether it is used."""
    if not has_window(fields):
        return {"sliding_window": None}
    sliding = sliding_layers(fields, config["num_hidden_layers"])
    types = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    return {"sliding_window": fields.integer("attention.sliding_window"), "layer_types": types}


def has_window(fields: Fields) -> bool:
    """Whether some layers of a file have a sliding window."""
    return bool(fields.optional_integer("attention.sliding_window"))


def has_no_window(fields: Fields) -> bool:
    """Whether no layers of a file have a sliding window."""
    return not has_window(fields)


def llama(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Llama, SmolLM3, PaddleOCR."""
    return {"attention_bias": _has(file, "attn_output.bias"), "mlp_bias": _has(file, "ffn_up.bias")}


def granite(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Granite."""
    multipliers = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    given = {name: fields.optional_number(key) for name, key in multipliers.items()}
    # Without a scale of its own, attention has the usual one, unlike in a config.json.
    given["attention_multiplier"] = given["attention_multiplier"] or config["head_dim"] ** -0.5
    return llama(file, fields, config) | {name: value for name, value in given.items() if value is not None}


def granite_moe(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Granite with experts."""
    return granite(file, fields, config) | experts.mixtral(file, fields, config)


def granite_moe_shared(file: GgufFile, fields: Fields, config: Config) -> Config:
    """The same with an MLP beside the experts."""
    size = fields.integer("expert_shared_feed_forward_length")
    return granite_moe(file, fields, config) | {"shared_intermediate_size": size}


def granite_hybrid(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Granite 4."""
    return granite(file, fields, config) | hybrids.granite_hybrid(file, fields, config)


def phi3(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Phi-3."""
    window = fields.optional_integer("attention.sliding_window") or None
    return {"sliding_window": window if window and window < config["max_position_embeddings"] else None}


def minicpm(file: GgufFile, fields: Fields, config: Config) -> Config:
    """MiniCPM. Older files have no multipliers; then the first models' hold."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    residual, divisor = fields.optional_number("residual_scale"), fields.optional_number("logit_scale")
    return {
        "scale_emb": fields.optional_number("embedding_scale") or 12.0,
        "scale_depth": residual * layers**0.5 if residual else 1.4,
        "dim_model_base": hidden / divisor if divisor else 256,
        "attention_bias": has_qkv(file.tensors, 0, "q", "bias"),
    }


def internlm2(file: GgufFile, fields: Fields, config: Config) -> Config:
    """InternLM 2."""
    return {"bias": has_qkv(file.tensors, 0, "q", "bias")}


def olmo(file: GgufFile, fields: Fields, config: Config) -> Config:
    """OLMo."""
    return {"clip_qkv": fields.optional_number("attention.clamp_kqv") or None}


def olmo3(file: GgufFile, fields: Fields, config: Config) -> Config:
    """OLMo 3, whose files have OLMo 2's architecture and a window. Scaling of rope is for layers without it."""
    given, local = _layer_types(fields, config), fields.optional_number("rope.freq_base_swa")
    if local is not None:
        given["rope_parameters"] = {"sliding_attention": {"rope_type": "default", "rope_theta": local}}
    return given


def exaone4(file: GgufFile, fields: Fields, config: Config) -> Config:
    """EXAONE 4."""
    return _layer_types(fields, config)


def stablelm(file: GgufFile, fields: Fields, config: Config) -> Config:
    """StableLM."""
    return {
        "use_qkv_bias": has_qkv(file.tensors, 0, "q", "bias"),
        "use_parallel_residual": not _has(file, "ffn_norm.weight"),
        "partial_rotary_factor": _rotated(fields, config),
    }


def starcoder2(file: GgufFile, fields: Fields, config: Config) -> Config:
    """StarCoder 2."""
    window = fields.optional_integer("attention.sliding_window", 1) or _STARCODER2_WINDOW
    return {"use_bias": has_qkv(file.tensors, 0, "q", "bias"), "sliding_window": window}


def phi2(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Phi-1 and Phi-2."""
    return {"partial_rotary_factor": _rotated(fields, config)}


def glm4(file: GgufFile, fields: Fields, config: Config) -> Config:
    """GLM-4. Files with sections are of models that see images too. They hold the rows of queries and keys in the order
    for heads that are rotated in halves. GLM-OCR has a layer for drafts.
    """
    return {
        **experts.drafts(fields, config),
        "partial_rotary_factor": _rotated(fields, config),
        "attention_bias": has_qkv(file.tensors, 0, "q", "bias"),
        "rope_interleave": fields.raw("rope.dimension_sections") is None,
    }


def ernie(file: GgufFile, fields: Fields, config: Config) -> Config:
    """ERNIE 4.5."""
    return {"use_bias": has_qkv(file.tensors, 0, "q", "bias")}


def hunyuan(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Hunyuan. The base of its rope is stretched in the file already."""
    return {"attention_bias": has_qkv(file.tensors, 0, "q", "bias")}


def hunyuan_vl(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Hunyuan that sees images too. Its files say how far the base of its rope is to be stretched."""
    alpha = fields.optional_number("rope.scaling.alpha")
    rope = {"rope_type": "dynamic", "alpha": alpha} if alpha else None
    return hunyuan(file, fields, config) | {"rope_scaling": rope}


def command_r(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Command R."""
    return {"logit_scale": fields.number("logit_scale"), "attention_bias": has_qkv(file.tensors, 0, "q", "bias")}


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
        # Files of models without ALiBi have a bias of 0.
        "attn_config": {"alibi": options["alibi_bias_max"] is not None, **options},
    }
