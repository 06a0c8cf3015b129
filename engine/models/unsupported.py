"""The error for an architecture that is not supported: what it is, which part is missing, and similar ones."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelError
from ..files.wording import shown
from .text_models import TEXT_MODELS, not_served
from .text_part import TEXT_CONFIGS

_MAX_NEAR = 5
_TASKS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")

# Models that compute even pure text in another way than their language model does.
_OTHER_MASKS = {
    "PaliGemmaForConditionalGeneration": "its prompts need bidirectional attention, and this server computes only "
    "causal attention",
}
# Fields that tell of a part that a decoder of attention and MLPs does not have, and what it is: those that no device
# here computes, and those that models of other architectures have here too.
_MISSING = (
    (("encoder_layers", "num_encoder_layers", "num_decoder_layers"), "an encoder"),
    (("cross_attention_layers",), "cross-attention"),
    (("index_topk",), "an indexer that selects the tokens to attend to (sparse attention)"),
    (("time_step_rank", "mamba_dt_rank"), "the state space of Mamba 1"),
    (("linear_attn_config",), "Kimi's delta attention"),
    (("full_attn_alpha_factor", "layernorm_linear_attention_alpha"), "lightning attention"),
    (("lru_width",), "a gated linear recurrence (RG-LRU)"),
)
# Fields that tell of a part that is not needed for text, and what it is.
_NOT_OF_TEXT = (
    (("vision_config", "visual", "vq_config"), "images"),
    (("audio_config", "speech_config", "sound_config"), "sound"),
)
_KNOWN = (
    (("kv_lora_rank", "q_lora_rank"), "latent attention (MLA)"),
    (("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"), "experts"),
    (("mamba_d_state", "ssm_state_size", "mamba_num_heads", "state_size", "ssm_cfg"), "a state space (Mamba)"),
    (("linear_num_value_heads", "linear_conv_kernel_dim"), "linear attention"),
    (("attn_layer_indices", "hybrid_override_pattern", "layers_block_type"), "several kinds of layers"),
)


def unsupported(name: object, config: Mapping[str, Any], known: Sequence[str]) -> ModelError:
    """The error for an architecture that is not `known`. Its config tells what it is made of."""
    if not isinstance(name, str):
        return ModelError(
            "a config.json without architectures is not supported: add the name of the model's class, such as "
            '"architectures": ["LlamaForCausalLM"]; docs/models.md has a list'
        )
    if task := _other_task(name, config):
        return ModelError(f"architecture {shown(name)} is not supported: {task}")
    if name in _OTHER_MASKS:
        return ModelError(f"architecture {shown(name)} is not supported: {_OTHER_MASKS[name]}")
    near = _near(name, known)
    like = f" Similar names that are supported: {', '.join(near)}." if near else ""
    lacks = _what_text_lacks(config) or _what_is_missing(config)
    return ModelError(f"architecture {shown(name)} is not supported. {lacks}.{like} docs/models.md has the whole list")


def _what_text_lacks(config: Mapping[str, Any]) -> str | None:
    """What is missing for the text part of a model that takes images or sound; None for a model of text alone."""
    kinds = _parts_of(config, _NOT_OF_TEXT)
    text = next((config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), dict)), None)
    if text is None:
        what = _what_is_missing(config)
        return f"It also takes {kinds}; only its text part would be served. {what}" if kinds else None
    kind = text.get("model_type")
    if isinstance(kind, str) and kind in TEXT_MODELS:
        return (
            f"Its language model, of type {shown(kind)}, is supported; what is missing is where this architecture "
            "keeps it"
        )
    return f"Only its text part would be served, and {not_served(kind)}. {_what_is_missing(text)}"


def _parts_of(config: Mapping[str, Any], parts: Sequence[tuple[Sequence[str], str]]) -> str:
    return " and ".join(part for fields, part in parts if any(_is_set(config.get(field)) for field in fields))


def _what_is_missing(config: Mapping[str, Any]) -> str:
    missing, known = _parts_of(config, _MISSING), _parts_of(config, _KNOWN)
    if missing:
        return f"Its config.json names {missing}, which is not implemented"
    if known:
        return (
            "Tidewheel has no description of its layers; other supported models have what its config.json names: "
            f"{known}"
        )
    return "Tidewheel has no description of its layers"


def _other_task(name: str, config: Mapping[str, Any]) -> str | None:
    if config.get("is_encoder_decoder") is True:
        return "it has an encoder that reads the prompt, and only decoder-only models are supported"
    if not any(task in name for task in _TASKS) and name.endswith(("Model", "Classification", "MaskedLM")):
        return "it does not generate text; --embedding-model serves embedding and reranking models"
    return None


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value not in (0, 1, {}, [])


def _near(name: str, known: Sequence[str]) -> list[str]:
    """The ones with a similar name. The part after the family's name is the same for most, and does not count."""
    by_family = {_family(other): other for other in known}
    return [by_family[family] for family in difflib.get_close_matches(_family(name), by_family, _MAX_NEAR, 0.5)]


def _family(name: str) -> str:
    for task in _TASKS:
        name = name.replace(task, "")
    return name.lower()
