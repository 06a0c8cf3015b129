"""Configs of published models with experts, latents, recurrent layers or several streams: see published_configs.py.

Those with fewer layers than the published ones have all kinds of them.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _config(
    architecture: str, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, **rest: Any
) -> Config:
    return {
        "architectures": [architecture],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "max_position_embeddings": 8192,
        **rest,
    }


_LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
}
_DELTA = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}


def _qwen3_5(hidden: int, heads: int, kv_heads: int, mlp: int, **rest: Any) -> Config:
    config = _config("", 248320, hidden, 4, heads, kv_heads, mlp, **_DELTA, **rest)
    del config["architectures"]
    return config


_QWEN3_5 = _qwen3_5(4096, 16, 4, 12288)
_QWEN3_5_MOE = _qwen3_5(
    *(2048, 16, 2, 5120),
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)

MIXTURES: dict[str, Config] = {
    "Bamba 9B": _config(
        *("BambaForCausalLM", 128256, 4096, 2, 32, 8, 14336),
        attn_layer_indices=[1],
        mamba_n_heads=128,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=128,
    ),
    "DeepSeek V2 Lite": _config(
        *("DeepseekV2ForCausalLM", 102400, 2048, 2, 16, 16, 10944),
        **_LATENT,
        q_lora_rank=None,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        topk_method="greedy",
        norm_topk_prob=False,
    ),
    "DeepSeek V3": _config(
        *("DeepseekV3ForCausalLM", 129280, 7168, 2, 128, 128, 18432),
        **_LATENT,
        q_lora_rank=1536,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
    ),
    "ERNIE 4.5 21B": _config(
        *("Ernie4_5_MoeForCausalLM", 103424, 2560, 2, 20, 4, 12288),
        head_dim=128,
        moe_num_experts=64,
        moe_k=6,
        moe_intermediate_size=1536,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
    ),
    "Falcon-H1 7B": _config(
        *("FalconH1ForCausalLM", 130049, 3072, 1, 12, 2, 12288),
        head_dim=128,
        mamba_n_heads=24,
        mamba_d_head=128,
        mamba_d_ssm=3072,
        mamba_n_groups=1,
        mamba_d_state=256,
        mamba_rms_norm=False,
    ),
    "Gemma 3n E4B": _config(
        *("Gemma3nForCausalLM", 262400, 2048, 10, 8, 2, 16384),
        head_dim=256,
        sliding_window=512,
        layer_types=[*["sliding_attention"] * 4, "full_attention"] * 2,
        num_kv_shared_layers=5,
        activation_sparsity_pattern=[0.95] * 5 + [0.0] * 5,
        laurel_rank=64,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144,
    ),
    "Gemma 4": _config(
        *("Gemma4ForCausalLM", 262144, 2304, 12, 8, 4, 9216),
        head_dim=256,
        sliding_window=512,
        num_kv_shared_layers=6,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144,
    ),
    "GLM-4.5 Air": _config(
        *("Glm4MoeForCausalLM", 151552, 4096, 2, 96, 8, 10944),
        head_dim=128,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        partial_rotary_factor=0.5,
        attention_bias=True,
    ),
    "GLM-4.7 Flash": _config(
        *("Glm4MoeLiteForCausalLM", 154880, 2048, 2, 20, 20, 10240),
        kv_lora_rank=512,
        q_lora_rank=768,
        qk_rope_head_dim=64,
        qk_nope_head_dim=192,
        v_head_dim=256,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
    ),
    "gpt-oss 20B": _config(
        *("GptOssForCausalLM", 201088, 2880, 2, 64, 8, 2880),
        head_dim=64,
        sliding_window=128,
        num_local_experts=32,
        num_experts_per_tok=4,
    ),
    "Granite 3.1 3B-A800M": _config(
        *("GraniteMoeForCausalLM", 49155, 1536, 1, 24, 8, 512), num_local_experts=40, num_experts_per_tok=8
    ),
    "Granite with a shared expert": _config(
        *("GraniteMoeSharedForCausalLM", 49155, 1536, 1, 24, 8, 512),
        num_local_experts=62,
        num_experts_per_tok=6,
        shared_intermediate_size=1024,
    ),
    "Granite 4 H Tiny": _config(
        *("GraniteMoeHybridForCausalLM", 100352, 1536, 2, 12, 4, 512),
        layer_types=["mamba", "attention"],
        num_local_experts=64,
        num_experts_per_tok=6,
        shared_intermediate_size=1024,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=128,
        position_embedding_type="nope",
    ),
    "Hunyuan A13B": _config(
        *("HunYuanMoEV1ForCausalLM", 128167, 4096, 1, 32, 8, 3072), head_dim=128, num_experts=64, moe_topk=8
    ),
    "LFM2 1.2B": _config(
        *("Lfm2ForCausalLM", 65536, 2048, 2, 32, 8, 12288), conv_L_cache=3, layer_types=["conv", "full_attention"]
    ),
    "LFM2 8B-A1B": _config(
        *("Lfm2MoeForCausalLM", 65536, 2048, 3, 32, 8, 7168),
        conv_L_cache=3,
        layer_types=["conv", "conv", "full_attention"],
        num_dense_layers=1,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1792,
    ),
    "Llama 4 Scout": _config(
        *("Llama4ForCausalLM", 202048, 5120, 4, 40, 8, 8192),
        head_dim=128,
        intermediate_size_mlp=16384,
        num_local_experts=16,
        num_experts_per_tok=1,
        attention_chunk_size=8192,
    ),
    "Mamba-Codestral 7B": {
        "architectures": ["Mamba2ForCausalLM"],
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 1,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
    },
    "MiniCPM 3 4B": _config(
        *("MiniCPM3ForCausalLM", 73448, 2560, 1, 40, 40, 6400),
        kv_lora_rank=256,
        q_lora_rank=768,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
    ),
    "Mixtral 8x7B": _config(
        *("MixtralForCausalLM", 32000, 4096, 1, 32, 8, 14336), num_local_experts=8, num_experts_per_tok=2
    ),
    "Moonlight 16B": _config(
        *("DeepseekV3ForCausalLM", 163840, 2048, 2, 16, 16, 11264),
        **_LATENT,
        q_lora_rank=None,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        n_group=1,
        topk_group=1,
    ),
    "Nemotron 3 Nano 30B": _config(
        *("NemotronHForCausalLM", 131072, 2688, 3, 32, 2, 1856),
        head_dim=128,
        hybrid_override_pattern="M*E",
        mamba_num_heads=64,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        n_routed_experts=128,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
    ),
    "OLMoE 7B": _config(*("OlmoeForCausalLM", 50304, 2048, 1, 16, 16, 1024), num_experts=64, num_experts_per_tok=8),
    "Phi-3.5-MoE": _config(
        *("PhiMoEForCausalLM", 32064, 4096, 1, 32, 8, 6400), num_local_experts=16, num_experts_per_tok=2
    ),
    "Phi-3.5-MoE as in transformers": _config(
        *("PhimoeForCausalLM", 32064, 4096, 1, 32, 8, 6400), num_local_experts=16, num_experts_per_tok=2
    ),
    "Qwen1.5-MoE A2.7B": _config(
        *("Qwen2MoeForCausalLM", 151936, 2048, 1, 16, 16, 5632),
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    ),
    "Qwen3 30B-A3B": _config(
        *("Qwen3MoeForCausalLM", 151936, 2048, 1, 32, 4, 6144),
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "Qwen3-Next 80B-A3B": _config(
        *("Qwen3NextForCausalLM", 151936, 2048, 4, 16, 2, 5120),
        **_DELTA,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "Qwen3.5 9B": {"architectures": ["Qwen3_5ForCausalLM"], **_QWEN3_5},
    "Qwen3.5 9B with its tower": {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": _QWEN3_5},
    "Qwen3.5 35B-A3B": {"architectures": ["Qwen3_5MoeForCausalLM"], **_QWEN3_5_MOE},
    "Qwen3.5 35B-A3B with its tower": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": _QWEN3_5_MOE,
    },
}
