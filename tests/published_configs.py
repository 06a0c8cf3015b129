"""Configs of published models: the shapes that people serve, for compilers that are asked without weights.

Each has what its `config.json` says of sizes, heads and layers. Fields that change no shape may be left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from published_mixtures import MIXTURES

from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import DecoderSpec, LayerSpec

Config = dict[str, Any]


def _config(
    architecture: str, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int | None, mlp: int, **rest: Any
) -> Config:
    """With the names that most architectures have for these."""
    own = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return {
        "architectures": [architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **own,
        "intermediate_size": mlp,
        "max_position_embeddings": 8192,
        **rest,
    }


def _gpt2(architecture: str, vocab: int, hidden: int, layers: int, heads: int, **rest: Any) -> Config:
    return {
        "architectures": [architecture],
        "vocab_size": vocab,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 2048,
        **rest,
    }


def _mpt(architecture: str) -> Config:
    return {
        "architectures": [architecture],
        "vocab_size": 50432,
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "max_seq_len": 2048,
        "attn_config": {"alibi": True},
    }


def _phi3(architecture: str, **rest: Any) -> Config:
    return _config(architecture, 32064, 3072, 32, 32, 32, 8192, **rest)


def _phi4(architecture: str) -> Config:
    return _config(architecture, 200064, 3072, 32, 24, 8, 8192, partial_rotary_factor=0.75, tie_word_embeddings=True)


PUBLISHED: dict[str, Config] = {
    "Aya 8B": _config("CohereForCausalLM", 256000, 4096, 32, 32, 8, 14336),
    "Bloomz 7B": {
        "architectures": ["BloomForCausalLM"],
        "vocab_size": 250880,
        "hidden_size": 4096,
        "n_layer": 30,
        "n_head": 32,
        "seq_length": 2048,
    },
    "Command R": _config("CohereForCausalLM", 256000, 8192, 40, 64, 64, 22528),
    "Command R7B": _config(
        "Cohere2ForCausalLM", 256000, 4096, 32, 32, 8, 14336, sliding_window=4096, sliding_window_pattern=4
    ),
    "ERNIE 4.5 0.3B": _config("Ernie4_5ForCausalLM", 103424, 1024, 18, 16, 2, 3072, head_dim=128),
    "EXAONE 4 32B": _config(
        "Exaone4ForCausalLM", 102400, 5120, 64, 40, 8, 27392, sliding_window=4096, sliding_window_pattern="LLLG"
    ),
    "Falcon 7B": _config(
        "FalconForCausalLM", 65024, 4544, 32, 71, None, 18176, multi_query=True, parallel_attn=True, bias=False
    ),
    "Falcon 40B": _config(
        *("FalconForCausalLM", 65024, 8192, 60, 128, None, 32768),
        num_kv_heads=8,
        new_decoder_architecture=True,
        parallel_attn=True,
        bias=False,
    ),
    "Falcon-RW 1B": _config(
        *("FalconForCausalLM", 50304, 2048, 24, 32, None, 8192),
        multi_query=False,
        alibi=True,
        parallel_attn=False,
        bias=True,
    ),
    "Gemma 2B": _config("GemmaForCausalLM", 256000, 2048, 18, 8, 1, 16384, head_dim=256),
    "Gemma 7B": _config("GemmaForCausalLM", 256000, 3072, 28, 16, 16, 24576, head_dim=256),
    "Gemma 2 2B": _config("Gemma2ForCausalLM", 256000, 2304, 26, 8, 4, 9216, head_dim=256, sliding_window=4096),
    "Gemma 2 9B": _config("Gemma2ForCausalLM", 256000, 3584, 42, 16, 8, 14336, head_dim=256, sliding_window=4096),
    "Gemma 2 27B": _config("Gemma2ForCausalLM", 256000, 4608, 46, 32, 16, 36864, head_dim=128, sliding_window=4096),
    "Gemma 3 1B": _config("Gemma3ForCausalLM", 262144, 1152, 26, 4, 1, 6912, head_dim=256, sliding_window=512),
    "Gemma 3 12B": _config("Gemma3ForCausalLM", 262208, 3840, 48, 16, 8, 15360, head_dim=256, sliding_window=1024),
    "GLM-4-0414 9B": _config(
        *("Glm4ForCausalLM", 151552, 4096, 40, 32, 2, 13696),
        head_dim=128,
        attention_bias=True,
        partial_rotary_factor=0.5,
    ),
    "GLM-4 9B": _config(
        *("GlmForCausalLM", 151552, 4096, 40, 32, 2, 13696),
        head_dim=128,
        attention_bias=True,
        partial_rotary_factor=0.5,
    ),
    "GPT-2 XL": _gpt2("GPT2LMHeadModel", 50257, 1600, 48, 25),
    "GPT-J 6B": _gpt2("GPTJForCausalLM", 50400, 4096, 28, 16, rotary_dim=64),
    "GPT-NeoX 20B": _config("GPTNeoXForCausalLM", 50432, 6144, 44, 64, None, 24576, rotary_pct=0.25),
    "Pythia 12B": _config("GPTNeoXForCausalLM", 50688, 5120, 36, 40, None, 20480, rotary_pct=0.25),
    "Granite 3.3 8B": _config("GraniteForCausalLM", 49159, 4096, 40, 32, 8, 12800),
    "Hunyuan 7B": _config("HunYuanDenseV1ForCausalLM", 128167, 4096, 32, 32, 8, 14336, head_dim=128),
    "InternLM 2.5 7B": _config("InternLM2ForCausalLM", 92544, 4096, 32, 32, 8, 14336),
    "Llama 2 7B": _config("LlamaForCausalLM", 32000, 4096, 32, 32, 32, 11008),
    "Llama 3.2 1B": _config("LlamaForCausalLM", 128256, 2048, 16, 32, 8, 8192, head_dim=64, tie_word_embeddings=True),
    "Llama 3.1 8B": _config("LlamaForCausalLM", 128256, 4096, 32, 32, 8, 14336),
    "Llama 3.3 70B": _config("LlamaForCausalLM", 128256, 8192, 80, 64, 8, 28672),
    "SmolLM2 360M": _config("LlamaForCausalLM", 49152, 960, 32, 15, 5, 2560, tie_word_embeddings=True),
    "MiniCPM 2B": _config("MiniCPMForCausalLM", 122753, 2304, 40, 36, 36, 5760),
    "MiniCPM 4 8B": _config("MiniCPMForCausalLM", 73448, 4096, 32, 32, 2, 16384),
    "Ministral 3 8B": _config("Ministral3ForCausalLM", 131072, 4096, 34, 32, 8, 14336, head_dim=128),
    "Ministral 8B": _config(
        *("MinistralForCausalLM", 131072, 4096, 36, 32, 8, 12288),
        head_dim=128,
        sliding_window=32768,
        layer_types=["full_attention", *["sliding_attention"] * 3] * 9,
    ),
    "Mistral 7B": _config("MistralForCausalLM", 32000, 4096, 32, 32, 8, 14336, sliding_window=4096),
    "Mistral Small 24B": _config("MistralForCausalLM", 131072, 5120, 40, 32, 8, 32768, head_dim=128),
    "MPT 7B": _mpt("MptForCausalLM"),
    "MPT 7B as released": _mpt("MPTForCausalLM"),
    "OLMo 7B 0724": _config("OlmoForCausalLM", 50304, 4096, 32, 32, 32, 11008),
    "OLMo 2 13B": _config("Olmo2ForCausalLM", 100352, 5120, 40, 40, 40, 13824),
    "OLMo 3 7B": _config(
        *("Olmo3ForCausalLM", 100278, 4096, 32, 32, 32, 11008),
        sliding_window=4096,
        layer_types=[*["sliding_attention"] * 3, "full_attention"] * 8,
    ),
    "OPT 2.7B": _config("OPTForCausalLM", 50272, 2560, 32, 32, None, 10240, ffn_dim=10240),
    "Phi-2": _config("PhiForCausalLM", 51200, 2560, 32, 32, 32, 10240, partial_rotary_factor=0.4),
    "Phi-3 mini": _phi3("Phi3ForCausalLM", sliding_window=2047),
    "Phi-4": _config("Phi3ForCausalLM", 100352, 5120, 40, 40, 10, 17920),
    "Phi-3.5-vision": _phi3("Phi3VForCausalLM"),
    "Phi-4-multimodal as released": _phi4("Phi4MMForCausalLM"),
    "Phi-4-multimodal": _phi4("Phi4MultimodalForCausalLM"),
    "Qwen2.5 0.5B": _config("Qwen2ForCausalLM", 151936, 896, 24, 14, 2, 4864, tie_word_embeddings=True),
    "Qwen2.5 7B": _config("Qwen2ForCausalLM", 152064, 3584, 28, 28, 4, 18944),
    "Qwen3 8B": _config("Qwen3ForCausalLM", 151936, 4096, 36, 32, 8, 12288, head_dim=128),
    "SmolLM3 3B": _config("SmolLM3ForCausalLM", 128256, 2048, 36, 16, 4, 11008, tie_word_embeddings=True),
    "StableLM 2 1.6B": _config(
        "StableLmForCausalLM", 100352, 2048, 24, 32, 32, 5632, use_qkv_bias=True, partial_rotary_factor=0.25
    ),
    "StableLM 2 12B": _config(
        *("StableLmForCausalLM", 100352, 5120, 40, 32, 8, 13824),
        qk_layernorm=True,
        use_parallel_residual=True,
        partial_rotary_factor=0.25,
    ),
    "StarCoder": _gpt2("GPTBigCodeForCausalLM", 49152, 6144, 40, 48, n_inner=24576, multi_query=True),
    "StarCoder 2 15B": _config("Starcoder2ForCausalLM", 49152, 6144, 40, 48, 4, 24576, sliding_window=4096),
    "StarCoder 2 3B": _config("Starcoder2ForCausalLM", 49152, 3072, 30, 24, 2, 12288, sliding_window=4096),
    **MIXTURES,
}
"""By model. Of each architecture there are those whose heads differ in what a kernel makes of them."""


def published_spec(name: str) -> DecoderSpec:
    """The model of PUBLISHED with one layer of each kind: other layers are like one of these."""
    spec = describe(PUBLISHED[name]).spec
    kinds: dict[LayerSpec, None] = dict.fromkeys(spec.layers)
    return replace(spec, layers=tuple(kinds))
