"""The language models that are served within checkpoints of images or sound, by the type that their configs say."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from ..files.wording import shown

_MAX_NEAR = 5
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
    "use_bidirectional_attention": "vision",
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
    "cohere2": ("Cohere2ForCausalLM", {}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "emu3_text_model": ("LlamaForCausalLM", _EMU3),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", _GEMMA3),
    "gemma3n_text": ("Gemma3nForCausalLM", _GEMMA3N),
    "gemma4_text": ("Gemma4ForCausalLM", _GEMMA4),
    "gemma4_unified_text": ("Gemma4ForCausalLM", _GEMMA4_UNIFIED),
    "glm4v_moe_text": ("Glm4MoeForCausalLM", {"num_key_value_heads": 8, "attention_bias": True}),
    "glm4v_text": ("Glm4ForCausalLM", {"head_dim": None, "rms_norm_eps": 1e-5}),
    "glm_ocr_text": ("Glm4ForCausalLM", _GLM_OCR),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {}),
    "granite4_vision_text": ("GraniteForCausalLM", {}),
    "granite_docling_text": ("GraniteForCausalLM", _GRANITE_DOCLING),
    "hunyuan_vl_text": ("HunYuanDenseV1ForCausalLM", {"tie_word_embeddings": True}),
    "internlm2": ("InternLM2ForCausalLM", {}),
    "lfm2": ("Lfm2ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "llama4_text": ("Llama4ForCausalLM", _LLAMA4),
    "ministral3": ("Ministral3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", _MISTRAL),
    "mllama_text_model": ("LlamaForCausalLM", _MLLAMA),
    "nemotron_h": ("NemotronHForCausalLM", {}),
    "opt": ("OPTForCausalLM", _OPT),
    "paddleocr_vl_text": ("LlamaForCausalLM", _PADDLE_OCR),
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", _QWEN),
    "qwen2_5_omni_text": ("Qwen2ForCausalLM", {**_QWEN2_VL, "rms_norm_eps": 1e-6}),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", _QWEN2_VL),
    "qwen2_vl_text": ("Qwen2ForCausalLM", _QWEN2_VL),
    "qwen3": ("Qwen3ForCausalLM", _QWEN),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_omni_moe_text": ("Qwen3MoeForCausalLM", {"rope_theta": 1e6, "norm_topk_prob": True}),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", {"rope_theta": 5e5, "norm_topk_prob": True}),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {"rope_theta": 5e5}),
}
# What fields mean within one wrapper alone.
WITHIN: dict[str, Mapping[str, object]] = {
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


def not_served(kind: object) -> str:
    """The error for a language model whose type is not in `TEXT_MODELS`. It names similar types."""
    by_stem = {_stem(known): known for known in TEXT_MODELS}
    near = difflib.get_close_matches(_stem(str(kind)), by_stem, _MAX_NEAR, 0.5)
    types = ", ".join(by_stem[stem] for stem in near) if near else ", ".join(sorted(TEXT_MODELS))
    like = f"similar supported types: {types}" if near else f"the supported types are: {types}"
    return (
        f"its language model is of type {shown(kind)}, which is not supported in models that take images or "
        f"sound; {like}"
    )


def _stem(kind: str) -> str:
    return kind.removesuffix("_model").removesuffix("_text")
