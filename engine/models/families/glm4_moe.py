"""GLM-4.5 and its successors with experts (https://arxiv.org/abs/2508.06471)."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec
from .deepseek_experts import DEEPSEEK_EXPERTS, dense_layers_first, grouped_experts
from .expert_parts import EXPERT_NORMS, expert_layers
from .listing import Listing
from .mtp_parts import later_layer_mtp
from .names import llama_names
from .parts import attention, decoder, gated_mlp, uniform_layers

ARCHITECTURES = {"Glm4MoeForCausalLM": Listing("GLM-4.5, GLM-4.6, GLM-4.7")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """GLM-4 with experts. Half of a head is rotated. A layer for drafts may lie behind the others."""
    heads = attention(config, qkv_bias=config.flag("attention_bias", False))
    rope = rope_from_config(config.with_defaults(partial_rotary_factor=0.5), heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    qk_norm = norm if config.flag("use_qk_norm", False) else None
    heads, experts = replace(heads, rope=rope.spec, qk_norm=qk_norm), grouped_experts(config)
    layers = expert_layers(
        [heads] * uniform_layers(config),
        experts,
        norm,
        gated_mlp(config),
        dense_layers_first(config, 1),
    )
    spec = decoder(config, "glm4_moe", layers, norm, rope.max_positions)
    names = llama_names({**EXPERT_NORMS, **DEEPSEEK_EXPERTS})
    config = config.with_defaults(num_nextn_predict_layers=1)
    mtp = later_layer_mtp(config, names, norm, expert_layers([heads], experts, norm)[0], {})
    return replace(names.describe(spec), mtp=mtp)
