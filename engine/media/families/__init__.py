"""How families of models see images, one file each: `vision`, from a model's config to its Vision."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from ..vision import Vision
from .settings import embedding_multiplier

__all__ = ["FAMILIES", "vision_of"]


class _Family(Protocol):
    """What the module of a family has."""

    def vision(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision:
        """The vision of one of its architectures."""
        ...


def vision_of(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Vision | None:
    """The vision of the model of a config.json; None if its architecture has no images here.

    `processor` is preprocessor_config.json, or what processor_config.json says of the image processor. What it leaves
    out is as transformers has it. Raises ModelError, naming the field, for what is not supported.
    """
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in FAMILIES:
        return None
    family = cast(_Family, import_module(f".{FAMILIES[name]}", __package__))
    vision = family.vision(name, config, processor)
    vision.embedding_multiplier = embedding_multiplier(name, config)
    return vision


# By architecture, the module that describes its vision. It is imported when a model has that architecture.
FAMILIES: Mapping[str, str] = {
    "AyaVisionForConditionalGeneration": "aya_vision",
    "Cohere2VisionForConditionalGeneration": "aya_vision",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified",
    "Glm46VForConditionalGeneration": "glm4v",
    "Glm4vForConditionalGeneration": "glm4v",
    "Glm4vMoeForConditionalGeneration": "glm4v",
    "Granite4VisionForConditionalGeneration": "granite4_vision",
    "GraniteDoclingForConditionalGeneration": "granite_docling",
    "Idefics3ForConditionalGeneration": "idefics3",
    "InternVLChatModel": "internvl_chat",
    "InternVLForConditionalGeneration": "internvl",
    "KimiVLForConditionalGeneration": "kimi_vl",
    "Lfm2VlForConditionalGeneration": "lfm2_vl",
    "Llama4ForConditionalGeneration": "llama4",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "LlavaOnevisionForConditionalGeneration": "llava_next",
    "MiniCPMO": "minicpmv_resampler",
    "MiniCPMV": "minicpmv_resampler",
    "MiniCPMV4_6ForConditionalGeneration": "minicpmv",
    "MiniCPMV4_7ForConditionalGeneration": "minicpmv4_7",
    "Mistral3ForConditionalGeneration": "pixtral",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl",
    "Phi3VForCausalLM": "phi3v",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "Qwen3_5ForConditionalGeneration": "qwen3_vl",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_vl",
    "SmolVLMForConditionalGeneration": "idefics3",
}
