"""Qwen1.5-MoE and Qwen2-MoE (https://arxiv.org/abs/2407.10671): many small experts beside a shared one with a gate."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import ExpertsSpec, MlpSpec, NormSpec, RouterSpec
from .expert_parts import (
    EXPERT_NORMS,
    QWEN_EXPERTS,
    expert_count,
    expert_layers,
    experts_per_token,
    shared_expert,
    sparse_layers,
)
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, gated_mlp, layer_windows, with_windows

ARCHITECTURES = {"Qwen2MoeForCausalLM": Listing("Qwen1.5 and Qwen2, with experts")}

_NAMES = {
    **EXPERT_NORMS,
    **QWEN_EXPERTS,
    **shared_expert("mlp.shared_expert"),
    "shared_gate": "mlp.shared_expert_gate",
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen2-MoE."""
    heads = attention(config, qkv_bias=config.flag("qkv_bias", True))
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm, activation = NormSpec("rms", config.number("rms_norm_eps", 1e-6)), config.activation("hidden_act", "silu")
    num_experts = expert_count(config, "num_experts")
    experts = ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts),
        config.integer("moe_intermediate_size"),
        activation,
        router=RouterSpec(normalize=config.flag("norm_topk_prob", False)),
        shared=MlpSpec(config.integer("shared_expert_intermediate_size"), activation, gated=True),
        shared_gate=True,
    )
    attentions = with_windows(replace(heads, rope=rope.spec), _windows(config))
    layers = expert_layers(attentions, experts, norm, gated_mlp(config), sparse_layers(config))
    return llama_names(_NAMES).describe(decoder(config, "qwen2_moe", layers, norm, rope.max_positions))


def _windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Each layer's window: by `layer_types`, else of every other of the first layers where windows are used."""
    use = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window", 4096) if use else None
    last = config.raw("max_window_layers")
    last = 28 if last is None else last
    if isinstance(last, bool) or not isinstance(last, int) or last < 0:
        raise config.error("max_window_layers", "an integer of at least 0")
    return layer_windows(config, window, lambda i: window is not None and i % 2 == 0 and i < last)
