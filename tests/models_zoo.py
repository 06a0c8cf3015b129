"""Tiny random models of every family, made with transformers in a temporary folder, and what transformers computes
with them."""

from __future__ import annotations

import atexit
import copy
import functools
import json
import shutil
import tempfile
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from samples import sample

VOCAB_SIZE = 320
PROMPT_LENGTHS = (1, 2, 5, 15, 16, 17, 33, 48)


@dataclass(frozen=True)
class Case:
    """A model to make: transformers' name of the family, and its config's fields.

    `everywhere`: TPUs have its mixers too. `attention` is the implementation to compare with.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    everywhere: bool = True
    attention: str = "eager"


_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_OPT = {
    "hidden_size": 64,
    "ffn_dim": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 64,
}
_NEOX = {
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rotary_pct": 0.5,
}
_FALCON = {
    "hidden_size": 64,
    "ffn_hidden_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_DELTA = {
    **_LLAMA,
    "head_dim": 24,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-4,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
}
_LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 56,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_MAMBA = {
    **_LLAMA,
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "rms_norm_eps": 1e-4,
}
# transformers takes `time_step_min` for a limit of the steps of prompts, and not of those after it.
_NEMOTRON = {
    **_LLAMA,
    "head_dim": 24,
    "mamba_num_heads": 4,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 20,
    "layer_norm_epsilon": 1e-4,
    "time_step_min": 1e-30,
}
_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


# Lengths are not multiples of a vector's: 160, 144 and 24 lanes of one kind leave tails of another.
CASES: dict[str, Case] = {
    "llama": Case("llama", _LLAMA),
    "llama-tied": Case("llama", {**_LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-bias": Case("llama", {**_LLAMA, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama-mqa": Case("llama", {**_LLAMA, "num_key_value_heads": 1, "head_dim": 24, "hidden_size": 72}),
    "llama-linear": Case("llama", {**_LLAMA, **_rope("linear", factor=4.0)}),
    "llama-dynamic": Case("llama", {**_LLAMA, **_rope("dynamic", factor=2.0)}),
    "llama-yarn": Case("llama", {**_LLAMA, **_rope("yarn", factor=4.0, original_max_position_embeddings=64)}),
    "llama-longrope": Case(
        "llama",
        {
            **_LLAMA,
            **_rope(
                "longrope",
                short_factor=[1.0 + 0.05 * i for i in range(8)],
                long_factor=[1.0 + 0.5 * i for i in range(8)],
                original_max_position_embeddings=128,
            ),
        },
    ),
    "llama-llama3": Case(
        "llama",
        {
            **_LLAMA,
            **_rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "mistral": Case("mistral", {**_LLAMA, "sliding_window": None}),
    "ministral": Case(
        "ministral",
        {**_LLAMA, "head_dim": 16, "sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "mistral-window": Case("mistral", {**_LLAMA, "sliding_window": 20}),
    "qwen2": Case("qwen2", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2-window": Case("qwen2", {**_LLAMA, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": Case("qwen3", {**_LLAMA, "head_dim": 32}),
    "opt": Case("opt", _OPT),
    "opt-350m": Case("opt", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 48}),
    "gpt2": Case("gpt2", _GPT2),
    "gpt2-scaled": Case("gpt2", {**_GPT2, "scale_attn_by_inverse_layer_idx": True, "n_inner": 152}),
    "gemma": Case("gemma", {**_LLAMA, "head_dim": 24}),
    "gemma2": Case(
        "gemma2",
        {
            **_LLAMA,
            "head_dim": 24,
            "rms_norm_eps": 1e-3,
            "sliding_window": 20,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": Case(
        "gemma3_text",
        {
            **_LLAMA,
            "head_dim": 24,
            "rms_norm_eps": 1e-3,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 10.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            },
        },
    ),
    "gemma3n": Case(
        "gemma3n_text",
        {
            **_LLAMA,
            "num_hidden_layers": 6,
            "intermediate_size": [160, 160, 160, 144, 144, 144],
            "head_dim": 24,
            "rms_norm_eps": 1e-3,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0, 0.0, 0.0],
            "vocab_size_per_layer_input": VOCAB_SIZE - 20,
            "hidden_size_per_layer_input": 24,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "laurel_rank": 20,
            "final_logit_softcapping": 10.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
        everywhere=False,
    ),
    "gemma4": Case(
        "gemma4_text",
        {
            **_LLAMA,
            "num_hidden_layers": 7,
            "head_dim": 24,
            "global_head_dim": 40,
            "rms_norm_eps": 1e-3,
            "sliding_window": 20,
            "layer_types": [*(["sliding_attention"] * 2 + ["full_attention"]) * 2, "full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 24,
            "final_logit_softcapping": 10.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000.0,
                },
            },
        },
        everywhere=False,
    ),
    "gemma4-experts": Case(
        "gemma4_text",
        {
            **_LLAMA,
            "num_hidden_layers": 3,
            "head_dim": 24,
            "global_head_dim": 32,
            "rms_norm_eps": 1e-3,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        },
        everywhere=False,
    ),
    "gemma4-keys": Case(
        "gemma4_text",
        {
            **_LLAMA,
            "num_hidden_layers": 3,
            "head_dim": 24,
            "global_head_dim": 48,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
        },
        everywhere=False,
    ),
    "deepseek-v2": Case(
        "deepseek_v2",
        {
            **_LLAMA,
            **_LATENTS,
            "num_hidden_layers": 3,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
        everywhere=False,
    ),
    "deepseek-v3": Case(
        "deepseek_v3",
        {
            **_LLAMA,
            **_LATENTS,
            **_rope(
                "yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.8, beta_fast=16.0
            ),
            "q_lora_rank": 40,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
        },
        everywhere=False,
    ),
    "glm4-moe-lite": Case(
        "glm4_moe_lite",
        {
            **_LLAMA,
            **_LATENTS,
            "q_lora_rank": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
        },
        everywhere=False,
    ),
    "minicpm3": Case(
        "minicpm3",
        {
            **_LLAMA,
            **_LATENTS,
            "q_lora_rank": 40,
            "dim_model_base": 32,
            "attention_bias": True,
            "mlp_bias": True,
        },
        everywhere=False,
    ),
    "granite": Case(
        "granite",
        {
            **_LLAMA,
            "rms_norm_eps": 1e-4,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": Case("phi3", {**_LLAMA, "sliding_window": 20}),
    "phi3-longrope": Case(
        "phi3",
        {
            **_LLAMA,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 128,
            **_rope(
                "longrope",
                short_factor=[1.0 + 0.05 * i for i in range(6)],
                long_factor=[1.0 + 0.5 * i for i in range(6)],
            ),
        },
    ),
    "olmo": Case("olmo", _LLAMA),
    "olmo2": Case("olmo2", _LLAMA),
    "smollm3": Case("smollm3", {**_LLAMA, "no_rope_layer_interval": 2, "mlp_bias": True}),
    "smollm3-window": Case(
        "smollm3", {**_LLAMA, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 12}
    ),
    "cohere": Case("cohere", {**_LLAMA, "attention_bias": True, "logit_scale": 0.3}),
    "cohere-norm": Case("cohere", {**_LLAMA, "use_qk_norm": True}),
    "cohere2": Case("cohere2", {**_LLAMA, "sliding_window": 20, "sliding_window_pattern": 2}),
    "gpt-neox": Case("gpt_neox", _NEOX),
    "gpt-neox-sequential": Case("gpt_neox", {**_NEOX, "use_parallel_residual": False, "attention_bias": False}),
    "stablelm": Case("stablelm", {**_LLAMA, "use_qkv_bias": True}),
    "stablelm-parallel": Case(
        "stablelm",
        {**_LLAMA, "use_parallel_residual": True, "partial_rotary_factor": 0.5, "qk_layernorm": True},
    ),
    "falcon": Case("falcon", _FALCON),
    "falcon-grouped": Case("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-one-norm": Case(
        "falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}
    ),
    # What transformers calls eager adds ALiBi twice.
    "falcon-alibi": Case(
        "falcon",
        {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
        attention="sdpa",
    ),
    "falcon-sequential": Case("falcon", {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True}),
    "qwen3_5": Case("qwen3_5_text", _DELTA, everywhere=False),
    "qwen3_next": Case(
        "qwen3_next",
        {**_DELTA, "num_experts": 0, "attention_bias": True, "linear_value_head_dim": 40},
        everywhere=False,
    ),
    "qwen3_next-experts": Case(
        "qwen3_next", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 40}, everywhere=False
    ),
    "qwen3_5-experts": Case(
        "qwen3_5_moe_text",
        {**_DELTA, **_EXPERTS, "linear_value_head_dim": 40, "shared_expert_intermediate_size": 40},
        everywhere=False,
    ),
    "granitemoehybrid": Case(
        "granitemoehybrid",
        {
            **_MAMBA,
            "num_local_experts": 0,
            "shared_intermediate_size": 144,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "attention_multiplier": 0.3,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "mamba_proj_bias": True,
        },
        everywhere=False,
    ),
    "granitemoehybrid-experts": Case(
        "granitemoehybrid",
        {
            **_MAMBA,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        everywhere=False,
    ),
    "bamba": Case("bamba", {**_MAMBA, "attn_layer_indices": [1], "mlp_bias": True}, everywhere=False),
    "falcon-h1": Case(
        "falcon_h1",
        {
            **_MAMBA,
            "mamba_d_ssm": 96,
            "embedding_multiplier": 6.0,
            "lm_head_multiplier": 0.4,
            "mlp_multipliers": [0.7, 0.6],
            "key_multiplier": 0.5,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_multipliers": [0.8, 1.3, 0.7, 1.1, 0.9],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.5,
        },
        everywhere=False,
    ),
    "falcon-h1-norm": Case(
        "falcon_h1",
        {
            **_MAMBA,
            "num_hidden_layers": 2,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "attention_bias": True,
            "mlp_bias": True,
            "ssm_multipliers": [0.8, 1.3, 0.7, 1.1, 0.9],
            "mamba_proj_bias": True,
            "projectors_bias": True,
        },
        everywhere=False,
    ),
    "nemotron-h": Case(
        "nemotron_h",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "mlp_bias": True},
        everywhere=False,
    ),
    "nemotron-h-attention": Case(
        "nemotron_h", {**_NEMOTRON, "layers_block_type": ["full_attention", "mlp", "full_attention"]}
    ),
    "nemotron-h-experts": Case(
        "nemotron_h",
        {
            **_NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        },
        everywhere=False,
    ),
    "mamba2": Case(
        "mamba2",
        {
            "hidden_size": 64,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 20,
            "num_hidden_layers": 2,
            "layer_norm_epsilon": 1e-4,
            "time_step_limit": [0.0, float("inf")],
            "use_bias": True,
        },
        everywhere=False,
    ),
    "lfm2": Case(
        "lfm2",
        {**_LLAMA, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "conv_bias": True},
        everywhere=False,
    ),
    "lfm2-experts": Case(
        "lfm2_moe",
        {
            **_LLAMA,
            **_EXPERTS,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
        },
        everywhere=False,
    ),
    "olmo3": Case(
        "olmo3",
        {
            **_LLAMA,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 1000.0,
                },
            },
        },
    ),
    "exaone4": Case(
        "exaone4", {**_LLAMA, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "exaone4-full": Case(
        "exaone4",
        {**_LLAMA, "sliding_window": None, "layer_types": ["full_attention"] * 2, "num_key_value_heads": 4},
    ),
    "glm": Case("glm", {**_LLAMA, "head_dim": 24}),
    "glm4": Case("glm4", {**_LLAMA, "head_dim": 24, "attention_bias": False}),
    "ministral3": Case(
        "ministral3",
        {
            **_LLAMA,
            "head_dim": 24,
            **_rope(
                "yarn",
                factor=16.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.4,
            ),
        },
    ),
    "bloom": Case("bloom", {"hidden_size": 72, "n_layer": 2, "n_head": 6}),
    "gptj": Case("gptj", {**_GPT2, "n_layer": 2, "rotary_dim": 12}),
    "phi": Case("phi", _LLAMA),
    "phi-norm": Case("phi", {**_LLAMA, "qk_layernorm": True, "partial_rotary_factor": 0.25}),
    "starcoder2": Case("starcoder2", {**_LLAMA, "sliding_window": 20}),
    "ernie4-5": Case("ernie4_5", {**_LLAMA, "head_dim": 24, "use_bias": True}),
    "hunyuan": Case("hunyuan_v1_dense", {**_LLAMA, "head_dim": 24, **_rope("dynamic", factor=1.0, alpha=50.0)}),
    "gpt-bigcode": Case("gpt_bigcode", {**_GPT2, "n_layer": 2}),
    "gpt-bigcode-heads": Case("gpt_bigcode", {**_GPT2, "n_layer": 2, "multi_query": False, "n_inner": 152}),
    "qwen2-moe": Case(
        "qwen2_moe",
        {
            **_LLAMA,
            **_EXPERTS,
            "num_hidden_layers": 3,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 20,
        },
        everywhere=False,
    ),
    "olmoe": Case("olmoe", {**_LLAMA, **_EXPERTS, "norm_topk_prob": True}, everywhere=False),
    "granitemoe": Case(
        "granitemoe",
        {
            **_LLAMA,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
        },
        everywhere=False,
    ),
    "granitemoe-shared": Case(
        "granitemoeshared",
        {
            **_LLAMA,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 40,
            "attention_multiplier": 0.3,
            "logits_scaling": 3.0,
        },
        everywhere=False,
    ),
    "gpt-oss": Case(
        "gpt_oss",
        {
            **_LLAMA,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 24,
            "sliding_window": 20,
            "swiglu_limit": 1.5,
        },
        everywhere=False,
    ),
    "glm4-moe": Case(
        "glm4_moe",
        {
            **_LLAMA,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        everywhere=False,
    ),
    "ernie4-5-moe": Case(
        "ernie4_5_moe",
        {**_LLAMA, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48},
        everywhere=False,
    ),
    "hunyuan-moe": Case(
        "hunyuan_v1_moe", {**_LLAMA, "head_dim": 24, "num_experts": 8, "moe_topk": 3}, everywhere=False
    ),
    "llama4": Case(
        "llama4_text",
        {
            **_LLAMA,
            "head_dim": 24,
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "floor_scale": 16,
        },
        everywhere=False,
    ),
    "mixtral": Case("mixtral", {**_LLAMA, "num_local_experts": 4}, everywhere=False),
    # Near experts share a token, more often than in the published models.
    "phimoe": Case(
        "phimoe",
        {
            **_LLAMA,
            "num_local_experts": 8,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            **_rope(
                "longrope",
                short_factor=[1.0 + 0.05 * i for i in range(8)],
                long_factor=[1.0 + 0.5 * i for i in range(8)],
                short_mscale=1.2,
                long_mscale=1.3,
                original_max_position_embeddings=128,
            ),
        },
        everywhere=False,
    ),
    "qwen3-moe": Case("qwen3_moe", {**_LLAMA, **_EXPERTS, "head_dim": 24, "norm_topk_prob": True}, everywhere=False),
    "mpt": Case("mpt", {"d_model": 72, "n_layers": 2, "n_heads": 6, "max_seq_len": 256}),
}

_EMBEDDINGS = ("embed_tokens", ".wte.", "embed_in", "word_embeddings")
_root = Path(tempfile.mkdtemp(prefix="tidewheel-zoo-"))
atexit.register(shutil.rmtree, _root, ignore_errors=True)


def config_of(case: Case) -> Any:
    """Transformers' config of the case."""
    from transformers import AutoConfig

    fields = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **case.config}
    return AutoConfig.for_model(case.model_type, vocab_size=VOCAB_SIZE, **fields)


def config_json(case: Case) -> dict[str, Any]:
    """What its config.json says."""
    from transformers import AutoModelForCausalLM

    config = config_of(case)
    said: dict[str, Any] = json.loads(config.to_json_string())
    return {**said, "architectures": [AutoModelForCausalLM._model_mapping[type(config)].__name__]}


def build(case: Case, seed: int = 0) -> Any:
    """A transformers model of the case, in float32, with weights large enough to make logits that are far apart."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(case), attn_implementation=case.attention).eval()
    generator = torch.Generator().manual_seed(seed)

    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.copy_(0.2 * noise + (1.0 if name.endswith("weight") else 0.0))
            elif any(part in name for part in _EMBEDDINGS):
                # Small, or a tied head would make every token repeat itself.
                weight.copy_(0.1 * noise)
            elif "embed_positions" in name or ".wpe." in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise * 1.5 / min(weight.shape[-2:]) ** 0.5)
        for name, weight in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return model


# Together they have all that attention and MLPs may be. `make test` computes them on every device, other cases on two
# devices. `make sweep` does the rest.
CORE = frozenset(
    {
        "llama-bias",
        "llama-mqa",
        "mistral-window",
        "qwen3",
        "opt-350m",
        "gpt2-scaled",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "granite",
        "minicpm3",
        "phi3-longrope",
        "olmo2",
        "smollm3-window",
        "cohere2",
        "gpt-neox",
        "falcon-one-norm",
        "mpt",
        "bloom",
        "hunyuan",
        "ministral3",
        "phi",
    }
)


@functools.cache
def model(name: str) -> Any:
    """The transformers model of CASES[name]."""
    return build(CASES[name])


def new_folder(name: str) -> Path:
    """An empty folder that is removed in the end."""
    path = _root / name
    path.mkdir()
    return path


@functools.cache
def folder(name: str, dtype: str = "float32", tokenizer: bool = False) -> Path:
    """A model folder of CASES[name]: config.json and model.safetensors, and a byte-level tokenizer where asked."""
    import torch

    path = _root / f"{name}-{dtype}-{'text' if tokenizer else 'ids'}"
    if dtype == "float32":
        model(name).save_pretrained(path)
    else:
        build(CASES[name]).to(getattr(torch, dtype)).save_pretrained(path)
    if tokenizer:
        train_tokenizer().save_pretrained(path)
    return path


EVERYWHERE = [name for name, case in CASES.items() if case.everywhere]


def swept(names: Iterable[str] = CASES, chosen: Container[str] = CORE) -> list[Any]:
    """Names as parameters of a test. Those that are not chosen are marked, so that only `make sweep` computes them."""
    return sample(names, chosen.__contains__)


def prompts(count: int = len(PROMPT_LENGTHS), seed: int = 1) -> list[list[int]]:
    """Random prompts; their lengths lie on both sides of block and tile boundaries."""
    random = np.random.default_rng(seed)
    return [random.integers(3, VOCAB_SIZE, PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)]).tolist() for i in range(count)]


def reference_logits(name: str, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Transformers' logits after each of the tokens, in one forward pass in float64. Shape [T, vocab]."""
    return _reference_logits(name, tuple(tokens))


@functools.cache
def _reference_logits(name: str, tokens: tuple[int, ...]) -> NDArray[np.float32]:
    import torch

    with torch.no_grad():
        logits: NDArray[np.float32] = _exact_model(name)(torch.tensor([tokens])).logits[0].float().numpy()
    return logits


@functools.cache
def _exact_model(name: str) -> Any:
    """The model in float64: in float32, transformers' own rounding may be more than the tests allow ours to be."""
    exact = copy.deepcopy(model(name)).double()
    exact.set_experts_implementation("eager")  # the other implementations lack float64
    return exact


@functools.cache
def train_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the quick brown fox jumps over the lazy dog and then the dog sleeps"] * 2, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=specials[1], eos_token=specials[2])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer
