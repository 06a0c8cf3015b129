"""What to say of an architecture that is not supported: what it is, which part is missing, and what is near."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelError
from ..files.wording import shown

_MOST_NEAR = 5
_TASKS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")

# Fields that tell of a part that a decoder of attention and MLPs does not have, and what it is: those that no device
# here computes, and those that models of other architectures have here too.
_MISSING = (
    (("encoder_layers", "num_encoder_layers", "num_decoder_layers"), "an encoder"),
    (("vision_config", "visual"), "an encoder of images"),
    (("audio_config", "speech_config"), "an encoder of sound"),
    (("cross_attention_layers",), "cross-attention"),
    (("index_topk",), "an indexer that chooses the tokens that attention sees"),
    (("time_step_rank", "mamba_dt_rank"), "the state space of the first Mamba"),
    (("linear_attn_config",), "Kimi's delta attention"),
    (("full_attn_alpha_factor", "layernorm_linear_attention_alpha"), "lightning attention"),
    (("lru_width",), "a gated linear recurrence (RG-LRU)"),
)
_KNOWN = (
    (("kv_lora_rank", "q_lora_rank"), "latent attention (MLA)"),
    (("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"), "experts"),
    (("mamba_d_state", "ssm_state_size", "mamba_num_heads", "state_size", "ssm_cfg"), "a state space (Mamba)"),
    (("linear_num_value_heads", "linear_conv_kernel_dim"), "linear attention"),
    (("attn_layer_indices", "hybrid_override_pattern", "layers_block_type"), "layers of several kinds"),
)


def unsupported(name: object, config: Mapping[str, Any], known: Sequence[str]) -> ModelError:
    """The error for an architecture that is none of those `known`. Its config tells what it is made of."""
    if not isinstance(name, str):
        return ModelError(
            "a config.json without architectures is not supported: add the name of the model's class, such as "
            '"architectures": ["LlamaForCausalLM"]; docs/models.md has a list'
        )
    if task := _other_task(name, config):
        return ModelError(f"architecture {shown(name)} is not supported: {task}")
    near = _near(name, known)
    like = f" Similar names that are supported: {', '.join(near)}." if near else ""
    lacks = _what_is_missing(config)
    return ModelError(f"architecture {shown(name)} is not supported. {lacks}.{like} docs/models.md has the whole list")


def _what_is_missing(config: Mapping[str, Any]) -> str:
    missing, known = (
        " and ".join(part for fields, part in parts if any(_is_set(config.get(field)) for field in fields))
        for parts in (_MISSING, _KNOWN)
    )
    if missing:
        return f"Its config.json names {missing}, which nothing here computes"
    if known:
        return f"What is missing is its description; other models here have what its config.json names: {known}"
    return "What is missing is its description"


def _other_task(name: str, config: Mapping[str, Any]) -> str | None:
    if config.get("is_encoder_decoder") is True:
        return "it has an encoder that reads the prompt, and only models that are a decoder alone are served"
    if not any(task in name for task in _TASKS) and name.endswith(("Model", "Classification", "MaskedLM")):
        return "it does not generate text; embedding and reranking models are served in ONNX with --embedding-model"
    return None


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value not in (0, 1, {}, [])


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Those with a like name. What follows the family's name is the same for most, and says nothing."""
    by_family = {_family(other): other for other in known}
    return [by_family[family] for family in difflib.get_close_matches(_family(name), by_family, _MOST_NEAR, 0.5)]


def _family(name: str) -> str:
    for task in _TASKS:
        name = name.replace(task, "")
    return name.lower()
