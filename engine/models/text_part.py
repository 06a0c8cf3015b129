"""The language model within a checkpoint that takes images or sound too.

Such a config has the language model's under `text_config`; the names of its tensors begin with where it lies. Text
alone is computed as by the language model alone: rope by sections, for time, height and width, turns all sections by
the same position then.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ModelError
from ..files.wording import shown
from .config import ConfigReader
from .description import ModelDescription

# Models whose layers see nothing but the embeddings of text, images and sound in one row.
WRAPPERS = (
    "AudioFlamingo3ForConditionalGeneration",
    "AyaVisionForConditionalGeneration",
    "Blip2ForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration",
    "Emu3ForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "FastVlmForConditionalGeneration",
    "FunAsrNanoForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "GlmAsrForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "GotOcr2ForConditionalGeneration",
    "Granite4VisionForConditionalGeneration",
    "GraniteDoclingForConditionalGeneration",
    "GraniteSpeechForConditionalGeneration",
    "GraniteSpeechPlusForConditionalGeneration",
    "HunYuanVLForConditionalGeneration",
    "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InstructBlipForConditionalGeneration",
    "InstructBlipVideoForConditionalGeneration",
    "InternVLChatModel",
    "InternVLForConditionalGeneration",
    "JanusForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "MiniCPMOcrForConditionalGeneration",
    "MiniCPMO",
    "MiniCPMV",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "MossTranscribeDiarizeForConditionalGeneration",
    "MusicFlamingoForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3",
    "OmniASRForConditionalGeneration",
    "Ovis2ForConditionalGeneration",
    "PaddleOCRVLForConditionalGeneration",
    "PerceptionLMForConditionalGeneration",
    "QianfanOCRForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "VibeVoiceAsrForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration",
    "VideoLlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)
# Where configs have the language model's fields.
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
# As they were first published, the language model's fields lie beside those of the other parts.
_FLAT = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl_text",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl_text",
    "HunYuanVLForConditionalGeneration": "hunyuan_vl_text",
}

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
_GEMMA4_UNIFIED = {
    **_GEMMA4,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_MLLAMA = {
    **_MISTRAL,
    "vocab_size": 128256,
    "num_hidden_layers": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
}
_EMU3 = {
    **_MISTRAL,
    "vocab_size": 184622,
    "max_position_embeddings": 9216,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_GLM_OCR = {
    "vocab_size": 59392,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 4096,
    "max_position_embeddings": 131072,
    "head_dim": None,
    "rms_norm_eps": 1e-5,
}
# Of ERNIE 4.5's sizes, but with heads that are rotated in halves, as Llama's.
_PADDLE_OCR: dict[str, object] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
_GRANITE_DOCLING = {
    "rms_norm_eps": 1e-5,
    "embedding_multiplier": 12.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.263,
    "attention_multiplier": 0.015625,
}
_OPT = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
}
_QWEN2_VL: dict[str, object] = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
# By the model_type of a text config: the architecture, and what the fields mean that it may leave out.
TEXT_MODELS: dict[str, tuple[str, Mapping[str, object]]] = {
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
    "qwen2_5_omni_text": ("Qwen2ForCausalLM", {**_QWEN2_VL, "rms_norm_eps": 1e-6}),
    "qwen3_omni_moe_text": ("Qwen3MoeForCausalLM", {"rope_theta": 1e6, "norm_topk_prob": True}),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {"rope_theta": 5e5}),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", {"rope_theta": 5e5, "norm_topk_prob": True}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "glm4v_text": ("Glm4ForCausalLM", {"head_dim": None, "rms_norm_eps": 1e-5}),
    "glm4v_moe_text": ("Glm4MoeForCausalLM", {"num_key_value_heads": 8, "attention_bias": True}),
    "granite": ("GraniteForCausalLM", {}),
    "granite4_vision_text": ("GraniteForCausalLM", {}),
    "granite_docling_text": ("GraniteForCausalLM", _GRANITE_DOCLING),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {}),
    "emu3_text_model": ("LlamaForCausalLM", _EMU3),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma4_unified_text": ("Gemma4ForCausalLM", _GEMMA4_UNIFIED),
    "glm_ocr_text": ("Glm4ForCausalLM", _GLM_OCR),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "hunyuan_vl_text": ("HunYuanDenseV1ForCausalLM", {"tie_word_embeddings": True}),
    "internlm2": ("InternLM2ForCausalLM", {}),
    "mllama_text_model": ("LlamaForCausalLM", _MLLAMA),
    "nemotron_h": ("NemotronHForCausalLM", {}),
    "opt": ("OPTForCausalLM", _OPT),
    "paddleocr_vl_text": ("LlamaForCausalLM", _PADDLE_OCR),
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
}
# What fields mean within one wrapper alone.
_WITHIN: dict[str, Mapping[str, object]] = {
    "GlmAsrForConditionalGeneration": {
        "vocab_size": 59264,
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    },
}
# Whose first configs do not say the type of their language model.
_LLAVA = ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration", "VipLlavaForConditionalGeneration")
_MINICPM_V = ("MiniCPMO", "MiniCPMV")
_MINICPM_V_TEXT = {"2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"}  # by the version that a config says
_MOST_NEAR = 5

# Where the decoder of the language model may lie. Its head is beside it.
_DECODERS = ("model.language_model.", "language_model.model.", "model.text_model.")
# Where a whole language model may lie, with its head and by its own names.
_WHOLE = ("language_model.", "text_model.", "llm.")
_LAYER = re.compile(r"(.*\.layers\.)(\d{1,6})(\..*)")
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
    "model.vision_embed_tokens.",
    "model.vqmodel.",
    "model.visual_embeddings_table.",
)


def text_part(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the language model in a config of one of `WRAPPERS`, with its architecture.

    Raises ModelError, naming the field, for one that is not there or of a model that is not supported.
    """
    if isinstance(config.get("thinker_config"), dict):
        config = config["thinker_config"]
    text = next((config[name] for name in TEXT_CONFIGS if config.get(name) is not None), None)
    if text is None and architecture in _FLAT:
        text = {**config, "model_type": _FLAT[architecture]}
    if text is None and architecture in _MINICPM_V:
        text = {**config, "model_type": _minicpm_v(config)}
    if not isinstance(text, dict):
        raise ModelError(f"config.json: text_config must be an object, got {shown(text)}")
    kind = text.get("model_type", "llama" if architecture in _LLAVA else None)
    if not isinstance(kind, str) or kind not in TEXT_MODELS:
        raise ModelError(f"architecture {shown(architecture)} is not supported with this config: {not_served(kind)}")
    name, defaults = TEXT_MODELS[kind]
    made = {**defaults, **_WITHIN.get(architecture, {}), **text, "architectures": [name]}
    if config.get("tie_word_embeddings") is not None:
        made["tie_word_embeddings"] = config["tie_word_embeddings"]
    if kind == "glm_ocr_text":
        made["attention_bias"] = False  # which it lacks whatever its config says
    if kind == "mllama_text_model":
        made["num_hidden_layers"] = len(_own_layers(made))
    if kind == "paddleocr_vl_text" and made.get("use_bias"):
        made |= {"attention_bias": True, "mlp_bias": True}
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(made.get(field), dict):
            made[field] = _without_sections(made[field])
    return made


def as_text_part(description: ModelDescription, text: Mapping[str, Any]) -> ModelDescription:
    """The description of a model that lies in a checkpoint of a wrapper, by the `text_part` of whose config it is."""
    description = replace(description, text_part=True)
    if text.get("model_type") != "mllama_text_model":
        return description
    # Layers that look at images are passed by where there are none. Its embedding has rows for image tokens too.
    embedding = replace(description.tensors["embed.weight"], rows=(0, description.spec.vocab_size))
    return replace(
        description,
        tensors={**description.tensors, "embed.weight": embedding},
        skipped_layers=tuple(text["cross_attention_layers"]),
    )


def _own_layers(text: Mapping[str, Any]) -> list[int]:
    """The layers of Llama 3.2 that do not look at images."""
    config = ConfigReader(text, "config.json: text_config")
    skipped, count = config.raw("cross_attention_layers"), config.num_layers("num_hidden_layers")
    if not isinstance(skipped, list) or not all(type(layer) is int and 0 <= layer < count for layer in skipped):
        raise config.error("cross_attention_layers", f"a list of numbers of layers, each below {count}")
    own = [layer for layer in range(count) if layer not in skipped]
    if not own:
        raise config.error("cross_attention_layers", f"a list without some of the {count} layers")
    return own


def not_served(kind: object) -> str:
    """What to say of a language model whose type is none of `TEXT_MODELS`. Types that are near are named."""
    by_stem = {_stem(known): known for known in TEXT_MODELS}
    near = difflib.get_close_matches(_stem(str(kind)), by_stem, _MOST_NEAR, 0.5)
    types = ", ".join(by_stem[stem] for stem in near) if near else ", ".join(sorted(TEXT_MODELS))
    like = f"similar ones that are: {types}" if near else f"these are: {types}"
    return f"its language model is of type {shown(kind)}, which is not served within a model of images or sound; {like}"


def _stem(kind: str) -> str:
    return kind.removesuffix("_model").removesuffix("_text")


def _minicpm_v(config: Mapping[str, Any]) -> str:
    version = str(config.get("version"))
    if version not in _MINICPM_V_TEXT:
        raise ModelError(
            f"config.json: version must be one of {', '.join(_MINICPM_V_TEXT)}, got {shown(config.get('version'))}: it "
            "says which language model is within"
        )
    return _MINICPM_V_TEXT[version]


def _without_sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    sections = {"mrope_section", "mrope_interleaved", "xdrope_section"}
    if not sections & rope.keys():
        return dict(rope)
    plain = {"mrope": "default", "xdrope": "dynamic"}
    rest = {key: value for key, value in rope.items() if key not in sections}
    return {key: plain.get(kind, kind) if key in ("type", "rope_type") else kind for key, kind in rest.items()}


def text_name(name: str, description: ModelDescription) -> str | None:
    """What the language model alone would call the tensor `name` of the checkpoint; None if it is of another part."""
    name = name.removeprefix("thinker.")
    if ".base_layer." in name:  # Phi-4-multimodal's, beside which are adapters for images and sound
        name = name.replace(".base_layer.", ".")
    elif ".lora_A." in name or ".lora_B." in name:
        return None
    if description.mtp is not None and name.startswith("mtp."):
        return name
    base = description.base_prefix
    whole = next((prefix for prefix in _WHOLE if name.startswith(prefix)), "")
    bare = name.removeprefix(whole)
    if bare == description.head_name or (whole and bare.startswith(base)):
        return _counted(bare, description.skipped_layers)
    for prefix in _DECODERS:
        if name.startswith(prefix):
            return _counted(base + name.removeprefix(prefix), description.skipped_layers)
    return name if name.startswith(base) and not name.startswith(_OTHERS) else None


def _counted(name: str, skipped: Sequence[int]) -> str | None:
    """The name with the number that its layer has without those that are skipped; None if it is of one of these."""
    if not skipped or not (found := _LAYER.fullmatch(name)):
        return name
    layer = int(found[2])
    return None if layer in skipped else f"{found[1]}{layer - sum(other < layer for other in skipped)}{found[3]}"


def parts_of(names: Iterable[str]) -> str:
    """The parts of a model that tensors of these names are of, for a log."""
    return ", ".join(sorted({".".join(name.split(".")[: 2 if name.startswith("model.") else 1]) for name in names}))
