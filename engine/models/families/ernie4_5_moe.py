"""ERNIE 4.5 with experts (https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import ExpertsSpec, MlpSpec, NormSpec, RouterSpec
from ..tensor_ref import TensorRef
from .expert_parts import EXPERT_NORMS, QWEN_EXPERTS, expert_count, expert_layers, experts_per_token, shared_expert
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, gated_mlp, uniform_layers

ARCHITECTURES = {"Ernie4_5_MoeForCausalLM": Listing("ERNIE 4.5, with experts", refused="biases")}

_NAMES = llama_names({**EXPERT_NORMS, **QWEN_EXPERTS, **shared_expert("mlp.shared_experts")})
_CORRECTION = {"router.correction_bias": TensorRef("mlp.moe_statics.e_score_correction_bias", index=0)}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """ERNIE 4.5 with experts."""
    config.refuse("use_bias", False)
    config.refuse("moe_norm_min", 1e-12)
    heads = attention(config.with_fields(num_key_value_heads=config.optional_integer("num_key_value_heads", 4)))
    rope = rope_from_config(config.with_defaults(rope_theta=500000.0), heads.head_dim, max_model_len)
    norm, activation = NormSpec("rms", config.number("rms_norm_eps", 1e-5)), config.activation("hidden_act", "silu")
    num_experts, size = expert_count(config, "moe_num_experts"), config.integer("moe_intermediate_size")
    shared = _at_least("moe_num_shared_experts", config, 2, 0)
    experts = ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts, "moe_k"),
        size,
        activation,
        router=RouterSpec(correction_bias=True),
        shared=MlpSpec(size * shared, activation, gated=True) if shared else None,
    )
    attention_mixer = replace(heads, rope=replace(rope.spec, interleaved=True))
    num_layers = uniform_layers(config)
    layers = expert_layers([attention_mixer] * num_layers, experts, norm, gated_mlp(config), _has_experts(config))
    spec = decoder(config, "ernie4_5_moe", layers, norm, rope.max_positions, tied=True)
    return _NAMES.describe(spec, _CORRECTION)


def _has_experts(config: ConfigReader) -> Callable[[int], bool]:
    """Every `moe_layer_interval`-th of the layers from `moe_layer_start_index` to `moe_layer_end_index`."""
    every, first = config.integer("moe_layer_interval", 1), _at_least("moe_layer_start_index", config, 1, 0)
    last = _at_least("moe_layer_end_index", config, -1, -1)
    return lambda i: (i + 1) % every == 0 and first <= i and (last == -1 or i <= last)


def _at_least(name: str, config: ConfigReader, default: int, least: int) -> int:
    value = config.raw(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise config.error(name, f"an integer of at least {least}")
    return value
