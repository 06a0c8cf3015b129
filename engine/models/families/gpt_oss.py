"""gpt-oss (https://arxiv.org/abs/2508.10925): sinks, windows in every other layer, experts with a clipped SwiGLU.

Its checkpoints hold the matrices of all experts in one tensor, transposed, with rows of gate and up in turn.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import ExpertsSpec, NormSpec, RouterSpec
from .expert_parts import EXPERT_NORMS, expert_count, expert_layers, experts_per_token, stacked
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, layer_windows, with_windows

ARCHITECTURES = {"GptOssForCausalLM": Listing("gpt-oss", refused="a `swiglu_alpha` other than 1.702")}

_NAMES = llama_names({**EXPERT_NORMS, "router": "mlp.router", "sinks": "self_attn.sinks"})
_GATE, _UP = (2, 0, 1), (2, 1, 2)  # of each two rows
_EXPERTS = {
    "experts.*.gate.weight": stacked("mlp.experts.gate_up_proj", transpose=True, each=_GATE),
    "experts.*.up.weight": stacked("mlp.experts.gate_up_proj", transpose=True, each=_UP),
    "experts.*.down.weight": stacked("mlp.experts.down_proj", transpose=True),
    "experts.*.gate.bias": stacked("mlp.experts.gate_up_proj_bias", each=_GATE),
    "experts.*.up.bias": stacked("mlp.experts.gate_up_proj_bias", each=_UP),
    "experts.*.down.bias": stacked("mlp.experts.down_proj_bias"),
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """gpt-oss. A config without rope parameters has YaRN's of the published models."""
    config.refuse("swiglu_alpha", 1.702)
    config.refuse("hidden_act", "silu")
    bias = config.flag("attention_bias", True)
    heads = attention(config.with_defaults(head_dim=64), qkv_bias=bias, out_bias=bias)
    if config.raw("rope_scaling") is None and config.raw("rope_parameters") is None:
        config = config.with_fields(rope_parameters=_ROPE)
    rope = rope_from_config(config.with_defaults(rope_theta=150000.0), heads.head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    num_experts = expert_count(config, "num_local_experts", "num_experts")
    experts = ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts),
        config.integer("intermediate_size"),
        bias=True,
        swiglu_limit=config.number("swiglu_limit", 7.0),
        router=RouterSpec(bias=True),
    )
    windows = layer_windows(config, config.optional_integer("sliding_window", 128), lambda i: i % 2 == 0)
    layers = expert_layers(with_windows(replace(heads, rope=rope.spec, sinks=True), windows), experts, norm)
    return _NAMES.describe(decoder(config, "gpt_oss", layers, norm, rope.max_positions), _EXPERTS)
