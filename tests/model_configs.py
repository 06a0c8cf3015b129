"""The smallest config of every architecture: only what has no default."""

from __future__ import annotations

from typing import Any

from tidewheel.engine.models import describe

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MINISTRAL = {**LLAMA, "architectures": ["MinistralForCausalLM"]}
INTERNLM2 = {**LLAMA, "architectures": ["InternLM2ForCausalLM"]}
MINICPM = {**LLAMA, "architectures": ["MiniCPMForCausalLM"]}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
}
MPT: dict[str, Any] = {
    "architectures": ["MptForCausalLM"],
    "vocab_size": 100,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 512,
}
MPT_AS_RELEASED = {**MPT, "architectures": ["MPTForCausalLM"]}
GEMMA = {**LLAMA, "architectures": ["GemmaForCausalLM"], "num_key_value_heads": 2}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"]}
GEMMA3 = {**LLAMA, "architectures": ["Gemma3ForCausalLM"]}
GEMMA3N = {**LLAMA, "architectures": ["Gemma3nForCausalLM"], "num_kv_shared_layers": 0}
GEMMA4 = {**LLAMA, "architectures": ["Gemma4ForCausalLM"]}
MINICPM3 = {**LLAMA, "architectures": ["MiniCPM3ForCausalLM"]}
_EXPERTS = {"num_experts_per_tok": 2}
DEEPSEEK_V2 = {**LLAMA, **_EXPERTS, "architectures": ["DeepseekV2ForCausalLM"]}
DEEPSEEK_V3 = {**LLAMA, "architectures": ["DeepseekV3ForCausalLM"]}
GLM4_MOE_LITE = {**LLAMA, "architectures": ["Glm4MoeLiteForCausalLM"]}
GRANITE = {**LLAMA, "architectures": ["GraniteForCausalLM"]}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"]}
PHI3V = {**LLAMA, "architectures": ["Phi3VForCausalLM"]}
PHI4MM = {**LLAMA, "architectures": ["Phi4MMForCausalLM"]}
PHI4_MULTIMODAL = {**LLAMA, "architectures": ["Phi4MultimodalForCausalLM"]}
OLMO = {**LLAMA, "architectures": ["OlmoForCausalLM"]}
OLMO2 = {**LLAMA, "architectures": ["Olmo2ForCausalLM"]}
SMOLLM3 = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"]}
COHERE = {**LLAMA, "architectures": ["CohereForCausalLM"]}
COHERE2 = {**LLAMA, "architectures": ["Cohere2ForCausalLM"]}
NEOX = {**LLAMA, "architectures": ["GPTNeoXForCausalLM"]}
STABLELM = {**LLAMA, "architectures": ["StableLmForCausalLM"], "num_key_value_heads": 4}
FALCON = {**LLAMA, "architectures": ["FalconForCausalLM"]}
FALCON_H1 = {**LLAMA, "architectures": ["FalconH1ForCausalLM"], "num_attention_heads": 8}
NEMOTRON_H = {
    **LLAMA,
    "architectures": ["NemotronHForCausalLM"],
    "num_attention_heads": 8,
    "hybrid_override_pattern": "M-*E",
}
MAMBA2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 4096,
    "num_hidden_layers": 2,
}
QWEN3_NEXT = {**LLAMA, "architectures": ["Qwen3NextForCausalLM"], "num_experts": 0}
QWEN3_5 = {**LLAMA, "architectures": ["Qwen3_5ForCausalLM"]}
QWEN3_5_VL: dict[str, Any] = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": LLAMA}
QWEN3_5_MOE = {**LLAMA, "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 8}
QWEN3_5_MOE_VL = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": {**LLAMA, "num_experts": 8}}
LFM2 = {
    **LLAMA,
    "architectures": ["Lfm2ForCausalLM"],
    "num_attention_heads": 8,
    "layer_types": ["conv", "full_attention", "conv"],
}
LFM2_MOE = {**LFM2, "architectures": ["Lfm2MoeForCausalLM"], "num_experts": 4}
OLMO3 = {**LLAMA, "architectures": ["Olmo3ForCausalLM"]}
EXAONE4 = {**LLAMA, "architectures": ["Exaone4ForCausalLM"], "num_key_value_heads": 2}
GLM = {**LLAMA, "architectures": ["GlmForCausalLM"]}
GLM4 = {**LLAMA, "architectures": ["Glm4ForCausalLM"]}
MINISTRAL3 = {**LLAMA, "architectures": ["Ministral3ForCausalLM"], "num_key_value_heads": 2}
BLOOM = {**LLAMA, "architectures": ["BloomForCausalLM"]}
GPTJ = {**GPT2, "architectures": ["GPTJForCausalLM"], "rotary_dim": 8}
PHI = {**LLAMA, "architectures": ["PhiForCausalLM"]}
STARCODER2 = {**LLAMA, "architectures": ["Starcoder2ForCausalLM"]}
ERNIE = {**LLAMA, "architectures": ["Ernie4_5ForCausalLM"]}
HUNYUAN = {**LLAMA, "architectures": ["HunYuanDenseV1ForCausalLM"]}
BIGCODE = {**GPT2, "architectures": ["GPTBigCodeForCausalLM"]}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
PHIMOE = {**LLAMA, "architectures": ["PhiMoEForCausalLM"], "num_key_value_heads": 4, "num_local_experts": 4}
PHIMOE_OF_TRANSFORMERS = {**PHIMOE, "architectures": ["PhimoeForCausalLM"]}
QWEN3_MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
QWEN2_MOE = {**QWEN3_MOE, "architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 48}
OLMOE = {**LLAMA, "architectures": ["OlmoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
GRANITEMOE = {**OLMOE, "architectures": ["GraniteMoeForCausalLM"], "num_local_experts": 4}
GRANITEMOE_SHARED = {
    **GRANITEMOE,
    "architectures": ["GraniteMoeSharedForCausalLM"],
    "shared_intermediate_size": 4,
}
GPT_OSS = {**GRANITEMOE, "architectures": ["GptOssForCausalLM"]}
GLM4_MOE = {
    **LLAMA,
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
ERNIE4_5_MOE = {
    **LLAMA,
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 32,
}
GRANITE_HYBRID = {**LLAMA, "architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0}
BAMBA = {**LLAMA, "architectures": ["BambaForCausalLM"], "num_attention_heads": 8, "attn_layer_indices": [1]}
HUNYUAN_MOE = {**LLAMA, "architectures": ["HunYuanMoEV1ForCausalLM"], "num_experts": 4, "moe_topk": 2}
LLAMA4 = {
    **LLAMA,
    "architectures": ["Llama4ForCausalLM"],
    "num_key_value_heads": 4,
    "num_local_experts": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    config["architectures"][0]: config
    for config in (
        *(MINISTRAL, INTERNLM2, MINICPM, MPT_AS_RELEASED),
        *(LLAMA, MISTRAL, QWEN2, QWEN3, OPT, GPT2, MPT, GEMMA2, GEMMA3, GRANITE, PHI3, OLMO, OLMO2),
        *(GEMMA, GRANITEMOE_SHARED, PHI3V, PHI4MM, PHI4_MULTIMODAL),
        *(
            SMOLLM3,
            COHERE,
            COHERE2,
            NEOX,
            STABLELM,
            FALCON,
            QWEN3_NEXT,
            QWEN3_5,
            QWEN3_5_VL,
            QWEN3_5_MOE,
            QWEN3_5_MOE_VL,
            LFM2,
            LFM2_MOE,
        ),
        *(OLMO3, EXAONE4, GLM, GLM4, MINISTRAL3, BLOOM, GPTJ, PHI, STARCODER2, ERNIE, HUNYUAN, BIGCODE),
        *(MIXTRAL, QWEN3_MOE, QWEN2_MOE, OLMOE, GRANITEMOE, GPT_OSS, GLM4_MOE, ERNIE4_5_MOE),
        *(HUNYUAN_MOE, LLAMA4, PHIMOE, PHIMOE_OF_TRANSFORMERS),
        *(GRANITE_HYBRID, BAMBA, FALCON_H1, NEMOTRON_H, MAMBA2),
        *(GEMMA3N, GEMMA4, MINICPM3, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE),
    )
}


def windows(config: dict[str, Any]) -> list[int | None]:
    return [attention.sliding_window for attention in describe(config).spec.attentions()]
