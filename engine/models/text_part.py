"""The language model within a checkpoint that takes images or sound too.

Such a config has the language model's under `text_config`; the names of its tensors begin with where it lies. Text
alone is computed as by the language model alone: rope by sections, for time, height and width, turns all sections by
the same position then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ModelError
from ..files.wording import shown
from .description import ModelDescription

# Models whose layers see nothing but the embeddings of text, images and sound in one row.
WRAPPERS = (
    "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "QianfanOCRForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration",
    "VideoLlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)
_QWEN_VL = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
}
_LLAMA4 = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "max_position_embeddings": 131072,
}
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
}
_GEMMA3N = {**_GEMMA3, "vocab_size": 262400, "hidden_size": 2048, "num_hidden_layers": 35, "intermediate_size": 16384}
_GEMMA4 = {**_GEMMA3, "vocab_size": 262144, "num_hidden_layers": 30}
_QWEN2_VL: dict[str, object] = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
# By the model_type of a text config: the architecture, and what the fields mean that it may leave out.
_TEXT_MODELS: dict[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "lfm2": ("Lfm2ForCausalLM", {}),
    "llama4_text": ("Llama4ForCausalLM", _LLAMA4),
    "mistral": ("MistralForCausalLM", _MISTRAL),
    "ministral3": ("Ministral3ForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", _QWEN),
    "qwen3": ("Qwen3ForCausalLM", _QWEN),
    "gemma3_text": ("Gemma3ForCausalLM", _GEMMA3),
    "gemma3n_text": ("Gemma3nForCausalLM", _GEMMA3N),
    "gemma4_text": ("Gemma4ForCausalLM", _GEMMA4),
    "cohere2": ("Cohere2ForCausalLM", {}),
    "qwen2_vl_text": ("Qwen2ForCausalLM", _QWEN2_VL),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", _QWEN2_VL),
    "qwen2_5_omni_text": ("Qwen2ForCausalLM", _QWEN2_VL),
    "qwen3_omni_moe_text": ("Qwen3MoeForCausalLM", {"rope_theta": 1e6, "norm_topk_prob": True}),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {"rope_theta": 5e5}),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", {"rope_theta": 5e5, "norm_topk_prob": True}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "glm4v_text": ("Glm4ForCausalLM", {"head_dim": None, "rms_norm_eps": 1e-5}),
    "glm4v_moe_text": ("Glm4MoeForCausalLM", {"num_key_value_heads": 8, "attention_bias": True}),
    "granite": ("GraniteForCausalLM", {}),
}
_OMNI = ("Qwen2_5OmniForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration")  # with a model that speaks

# Where the decoder of the language model may lie. Its head is beside it.
_DECODERS = ("model.language_model.", "language_model.model.", "model.text_model.")
# What begins with "model." too, and is no language model.
_OTHERS = (
    "model.vision_tower.",
    "model.vision_model.",
    "model.visual.",
    "model.multi_modal_projector.",
    "model.connector.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
    "model.embed_tokens_extend.",
    "model.image_newline",
)


def text_part(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the language model in a config of one of `WRAPPERS`, with its architecture.

    Raises ModelError, naming the field, for one that is not there or of a model that is not supported.
    """
    if architecture in _OMNI and isinstance(config.get("thinker_config"), dict):
        config = config["thinker_config"]
    text = config.get("text_config")
    if text is None and architecture in _QWEN_VL:  # as it was first published
        text = {**config, "model_type": "qwen2_vl_text"}
    if not isinstance(text, dict):
        raise ModelError(f"config.json: text_config must be an object, got {shown(text)}")
    kind = text.get("model_type", "llama")  # what Llava's first configs leave out
    if not isinstance(kind, str) or kind not in _TEXT_MODELS:
        raise ModelError(
            f"config.json: {architecture} has a language model of type {shown(kind)}, which is not supported; "
            f"supported are {', '.join(sorted(_TEXT_MODELS))}"
        )
    name, defaults = _TEXT_MODELS[kind]
    made = {**defaults, **text, "architectures": [name]}
    if config.get("tie_word_embeddings") is not None:
        made["tie_word_embeddings"] = config["tie_word_embeddings"]
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(made.get(field), dict):
            made[field] = _without_sections(made[field])
    return made


def _without_sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    if "mrope_section" not in rope:
        return dict(rope)
    rest = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return {key: "default" if key in ("type", "rope_type") and kind == "mrope" else kind for key, kind in rest.items()}


def text_name(name: str, description: ModelDescription) -> str | None:
    """What the language model alone would call the tensor `name` of the checkpoint; None if it is of another part."""
    name = name.removeprefix("thinker.")
    if ".base_layer." in name:  # Phi-4-multimodal's, beside which are adapters for images and sound
        name = name.replace(".base_layer.", ".")
    elif ".lora_A." in name or ".lora_B." in name:
        return None
    if description.mtp is not None and name.startswith("mtp."):
        return name
    for prefix in _DECODERS:
        if name.startswith(prefix):
            return description.base_prefix + name.removeprefix(prefix)
    bare = name.removeprefix("language_model.")
    if bare == description.head_name:
        return bare
    return name if name.startswith(description.base_prefix) and not name.startswith(_OTHERS) else None


def parts_of(names: Iterable[str]) -> str:
    """The parts of a model that tensors of these names are of, for a log."""
    return ", ".join(sorted({".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in names}))
