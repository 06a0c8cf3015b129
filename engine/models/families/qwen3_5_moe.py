"""Qwen3.5 and 3.6 with experts (https://qwen.ai/blog?id=qwen3.5); the text part."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from .expert_parts import EXPERT_NORMS, stacked
from .hybrids import SHARED_EXPERT_MODULES, qwen_mlps
from .listing import Listing
from .qwen3_5 import described, text_config

_MULTIMODAL = "Qwen3_5MoeForConditionalGeneration"
ARCHITECTURES = {
    "Qwen3_5MoeForCausalLM": Listing("Qwen3.5 and 3.6, with experts, without their MTP layer"),
    _MULTIMODAL: Listing("Qwen3.5 and 3.6, with experts: their text part, without the MTP layer"),
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen3.5 with experts. Checkpoints of multimodal models hold the matrices of all experts in one tensor."""
    if architecture == _MULTIMODAL:
        config = text_config(config)
    config = config.with_defaults(num_key_value_heads=2)
    mlps = qwen_mlps(config, 256, 8)
    modules = {**EXPERT_NORMS, **SHARED_EXPERT_MODULES}
    if architecture != _MULTIMODAL:
        return described("qwen3_5_moe", config, mlps, max_model_len, modules)
    size = config.integer("moe_intermediate_size", 512)
    refs = {
        "experts.*.gate.weight": stacked("mlp.experts.gate_up_proj", rows=(0, size)),
        "experts.*.up.weight": stacked("mlp.experts.gate_up_proj", rows=(size, 2 * size)),
        "experts.*.down.weight": stacked("mlp.experts.down_proj"),
    }
    description = described("qwen3_5_moe", config, mlps, max_model_len, modules, refs, "model.language_model.")
    return replace(description, text_part=True)
