"""Hunyuan with experts (https://arxiv.org/abs/2411.02265): every layer has experts and a shared one."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import ExpertsSpec, MlpSpec, NormSpec
from .expert_parts import EXPERT_NORMS, QWEN_EXPERTS, expert_count, expert_layers, experts_per_token, shared_expert
from .hunyuan_v1_dense import HUNYUAN_QK_NORMS, with_stretched_base
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, uniform_layers

ARCHITECTURES = {
    "HunYuanMoEV1ForCausalLM": Listing(
        "Hunyuan, with experts",
        refused="K and V shared by layers (`use_cla`); layers with different numbers of experts",
    ),
}

_NAMES = llama_names({
    **EXPERT_NORMS,
    **QWEN_EXPERTS,
    **shared_expert("mlp.shared_mlp"),
    **HUNYUAN_QK_NORMS,
    "router": "mlp.gate.wg",
})  # fmt: skip


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Hunyuan with experts. Fields that have a number for each layer must say the same of all."""
    config.refuse("use_qk_norm", True)
    config.refuse("use_cla", False)
    config.refuse("use_mixed_mlp_moe", True)
    bias = config.flag("attention_bias", False)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(with_stretched_base(config, heads.head_dim), heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    for name in ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size"):
        config = _same_in_all_layers(config, name)
    num_experts, activation = expert_count(config, "num_experts"), config.activation("hidden_act", "silu")
    size = config.integer("intermediate_size")
    config.refuse("num_shared_expert", 1)
    config.refuse("moe_intermediate_size", size)
    experts = ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts, "moe_topk"),
        size,
        activation,
        shared=MlpSpec(size, activation, gated=True),
    )
    mixer = replace(heads, rope=rope.spec, qk_norm=norm, qk_norm_after_rope=True)
    layers = expert_layers([mixer] * uniform_layers(config), experts, norm)
    return _NAMES.describe(decoder(config, "hunyuan_v1_moe", layers, norm, rope.max_positions))


def _same_in_all_layers(config: ConfigReader, name: str) -> ConfigReader:
    value = config.raw(name)
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        return config.with_fields(**{name: value[0]})
    return config
