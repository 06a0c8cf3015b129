"""Qwen3 (https://arxiv.org/abs/2505.09388), dense: Qwen2 with query and key norms and a head dim of its own."""

from __future__ import annotations

from .config import ConfigReader
from .description import ModelDescription
from .llama import describe_llama_like
from .qwen2 import sliding_windows

ARCHITECTURES = ("Qwen3ForCausalLM",)


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen3. A config without `head_dim` has one of 128, whatever its hidden size."""
    attention_bias = config.flag("attention_bias", False)
    return describe_llama_like(
        config,
        family="qwen3",
        head_dim=config.integer("head_dim", 128),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=False,
        qk_norm=True,
        windows=sliding_windows(config),
        max_model_len=max_model_len,
    )
