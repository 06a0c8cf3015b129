"""Qwen3.5 and 3.6 with experts (https://qwen.ai/blog?id=qwen3.5); the text part."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from .expert_parts import EXPERT_NORMS, ExpertsTogether
from .hybrids import SHARED_EXPERT_MODULES, qwen_mlps
from .listing import Listing
from .qwen3_5 import described, text_config

_MULTIMODAL = "Qwen3_5MoeForConditionalGeneration"
ARCHITECTURES = {
    "Qwen3_5MoeForCausalLM": Listing("Qwen3.5 and 3.6, with experts"),
    _MULTIMODAL: Listing("Qwen3.5 and 3.6, with experts: their text part"),
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen3.5 with experts. Checkpoints hold each expert's matrices, or all experts' in one tensor."""
    is_multimodal = architecture == _MULTIMODAL
    if is_multimodal:
        config = text_config(config)
    config = config.with_defaults(num_key_value_heads=2)
    modules = {**EXPERT_NORMS, **SHARED_EXPERT_MODULES}
    base = "model.language_model." if is_multimodal else "model."
    description = described("qwen3_5_moe", config, qwen_mlps(config, 256, 8), max_model_len, modules, base=base)
    together = ExpertsTogether(base, config.integer("moe_intermediate_size", 512))
    return replace(description, otherwise=together, text_part=is_multimodal)
