"""The language model within a checkpoint that takes images or sound too.

Such a config has the language model's under `text_config`; the names of its tensors begin with where it lies. Text
alone is computed as by the language model alone: rope by sections, for time, height and width, turns all sections by
the same position then. The sections are kept of models whose images have such positions here.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ModelError
from ..files.wording import shown
from .config import ConfigReader
from .description import ModelDescription
from .spec import AttentionSpec, ResidualBlockSpec
from .text_models import TEXT_MODELS, WITHIN, not_served

# Models whose layers see nothing but the embeddings of text, images and sound in one row.
WRAPPERS = (
    "AudioFlamingo3ForConditionalGeneration",
    "AyaVisionForConditionalGeneration",
    "Blip2ForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "DeepseekVLForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration",
    "DotsOCRForCausalLM",
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
    "H2OVLChatModel",
    "HunYuanVLForConditionalGeneration",
    "Idefics2ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InstructBlipForConditionalGeneration",
    "InstructBlipVideoForConditionalGeneration",
    "InternS1ForConditionalGeneration",
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
    "MantisForConditionalGeneration",
    "MiniCPMO",
    "MiniCPMOcrForConditionalGeneration",
    "MiniCPMV",
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_7ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "MossTranscribeDiarizeForConditionalGeneration",
    "MusicFlamingoForConditionalGeneration",
    "NVLM_D",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
    "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
    "OmniASRForConditionalGeneration",
    "Ovis",
    "Ovis2ForConditionalGeneration",
    "Ovis2_5",
    "PaddleOCRVLForConditionalGeneration",
    "PerceptionLMForConditionalGeneration",
    "QianfanOCRForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "SkyworkR1VChatModel",
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
    "DotsOCRForCausalLM": "qwen2",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl_text",
    "HunYuanVLForConditionalGeneration": "hunyuan_vl_text",
}
# Whose first configs do not say the type of their language model.
_LLAVA = ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration", "VipLlavaForConditionalGeneration")
_MINICPM_V = ("MiniCPMO", "MiniCPMV")
_LLAMA_3_VOCABULARY = 128256
MINICPM_V_2_5 = "2.5"
_MINICPM_V_TEXT = {
    MINICPM_V_2_5: "llama",
    "2.6": "qwen2",
    "4.0": "llama",
    "4.5": "qwen3",
}  # by the version that a config says

# Of models whose images are served, the sections of rope that a config may leave out, and whether they take turns.
_SECTIONS = {
    "qwen2_vl_text": ([16, 24, 24], False),
    "qwen2_5_vl_text": ([16, 24, 24], False),
    "qwen3_vl_text": ([24, 20, 20], True),
    "qwen3_vl_moe_text": ([24, 20, 20], True),
    "paddleocr_vl_text": ([16, 24, 24], False),
    "glm4v_text": ([8, 12, 12], False),
    "glm4v_moe_text": ([8, 12, 12], False),
}
_WITH_SECTIONS = {*_SECTIONS, "qwen3_5_text"}  # that may have sections; the latter's family knows the rest
# Whose images' tokens see all of their image, in all layers or, if the config says so, in those with a window alone.
_TWO_WAY = "Gemma3ForConditionalGeneration"
_TWO_WAY_IN_WINDOWS = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")

_OWNER = "config.json: text_config"
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
    "model.projector.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.vision_embedder.",
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
    made = {**defaults, **WITHIN.get(architecture, {}), **text, "architectures": [name]}
    # A wrapper of a head of its own says whether that is tied, one of a whole language model does not.
    if config.get("tie_word_embeddings") is not None and (
        config.get("text_config") or "tie_word_embeddings" not in text
    ):
        made["tie_word_embeddings"] = config["tie_word_embeddings"]
    if kind == "glm_ocr_text":
        made["attention_bias"] = False  # it has none, whatever its config says
    if kind == "mllama_text_model":
        made["num_hidden_layers"] = len(_own_layers(made))
    if kind == "paddleocr_vl_text" and ConfigReader(made, _OWNER).flag("use_bias", False):
        made |= {"attention_bias": True, "mlp_bias": True}
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(made.get(field), dict):
            made[field] = _rope(kind, made[field])
    if kind in _SECTIONS:
        _add_sections(kind, made)
    return made


def as_text_part(architecture: str, description: ModelDescription, text: Mapping[str, Any]) -> ModelDescription:
    """The description of a model that lies in a checkpoint of a wrapper, by the `text_part` of whose config it is."""
    description = replace(description, text_part=True)
    if two_way(architecture, text):
        description = seeing_both_ways(description, in_windows=architecture != _TWO_WAY)
    if text.get("model_type") != "mllama_text_model":
        return description
    # Without images, layers that look at them are skipped. Its embedding has rows for image tokens too.
    embedding = replace(description.tensors["embed.weight"], rows=(0, description.spec.vocab_size))
    return replace(
        description,
        tensors={**description.tensors, "embed.weight": embedding},
        skipped_layers=tuple(sorted({*text["cross_attention_layers"]})),
    )


def two_way(architecture: str, text: Mapping[str, Any]) -> bool:
    """Whether tokens of an image see all of their image, in a model with this `text_part`."""
    if architecture in _TWO_WAY_IN_WINDOWS:
        return text.get("use_bidirectional_attention") == "vision"
    return architecture == _TWO_WAY


def seeing_both_ways(description: ModelDescription, *, in_windows: bool = False) -> ModelDescription:
    """The same model with layers in which an image's tokens see all of that image: all, or those with a window."""
    layers = tuple(
        tuple(_seeing_both_ways(residual, in_windows) for residual in layer) for layer in description.spec.layers
    )
    return replace(description, spec=replace(description.spec, layers=layers))


def _seeing_both_ways(residual: ResidualBlockSpec, in_windows: bool) -> ResidualBlockSpec:
    mixer = residual.mixer
    if not isinstance(mixer, AttentionSpec) or (in_windows and mixer.sliding_window is None):
        return residual
    return replace(residual, mixer=replace(mixer, two_way=True))


def _own_layers(text: Mapping[str, Any]) -> list[int]:
    """The layers of Llama 3.2 that do not look at images."""
    config = ConfigReader(text, _OWNER)
    skipped, count = config.raw("cross_attention_layers"), config.num_layers("num_hidden_layers")
    if not isinstance(skipped, list) or not all(type(layer) is int and 0 <= layer < count for layer in skipped):
        raise config.error("cross_attention_layers", f"a list of numbers of layers, each below {count}")
    own = sorted({*range(count)} - {*skipped})
    if not own:
        raise config.error("cross_attention_layers", f"a list without some of the {count} layers")
    return own


def minicpm_v_version(config: Mapping[str, Any]) -> str:
    """The version that a config of MiniCPM-V says. The first one that is served says none; its text is Llama 3's."""
    version = config.get("version")
    return MINICPM_V_2_5 if version is None and config.get("vocab_size") == _LLAMA_3_VOCABULARY else str(version)


def _minicpm_v(config: Mapping[str, Any]) -> str:
    version = minicpm_v_version(config)
    if version not in _MINICPM_V_TEXT:
        raise ModelError(
            f"config.json: version must be one of {', '.join(_MINICPM_V_TEXT)}, got {shown(config.get('version'))}: "
            "it says which language model the checkpoint has"
        )
    return _MINICPM_V_TEXT[version]


def _rope(kind: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings without sections, if images of this kind of language model are not served."""
    sections = {"mrope_section", "mrope_interleaved", "xdrope_section"}
    plain = {"mrope": "default", "xdrope": "dynamic"} if sections & rope.keys() else {}
    rest = {key: value for key, value in rope.items() if kind in _WITH_SECTIONS or key not in sections}
    for key in ("type", "rope_type"):
        if isinstance(name := rest.get(key), str):
            rest[key] = plain.get(name, name)
    return rest


def _add_sections(kind: str, text: dict[str, Any]) -> None:
    """Say whether sections of rope take turns, and which there are if the config does not say it."""
    sections, interleaved = _SECTIONS[kind]
    field = next((name for name in ("rope_scaling", "rope_parameters") if text.get(name)), "rope_parameters")
    rope = text.get(field) or {}
    if not isinstance(rope, dict):
        return  # an error that is found when it is read
    heads = ConfigReader(text, _OWNER)
    width = heads.integer("hidden_size") // heads.integer("num_attention_heads")
    if 2 * sum(sections) == heads.integer("head_dim", width):
        rope = {"mrope_section": sections, **rope}
    text[field] = {**rope, "mrope_interleaved": interleaved}


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
    before = bisect_left(skipped, layer)  # a file may name many tensors, and its config many layers
    is_skipped = before < len(skipped) and skipped[before] == layer
    return None if is_skipped else f"{found[1]}{layer - before}{found[3]}"


def parts_of(names: Iterable[str]) -> str:
    """The parts of a model that tensors of these names are of, for a log."""
    return ", ".join(sorted({_part(name) for name in names}))


def _part(name: str) -> str:
    if "language_model." in name and _LAYER.fullmatch(name):
        return "layers of cross-attention"
    return ".".join(name.split(".")[: 2 if name.startswith("model.") else 1])
