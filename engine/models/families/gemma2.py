"""Gemma 2 (https://arxiv.org/abs/2408.00118): norms before and after each mixer, windows in every other layer."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec, ResidualBlockSpec
from .listing import Listing
from .names import llama_names
from .parts import attention, decoder, gated_mlp, layer_windows, with_windows

ARCHITECTURES = {"Gemma2ForCausalLM": Listing("Gemma 2", refused="bidirectional attention")}

NAMES = llama_names({
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
})  # fmt: skip


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Gemma 2. Where the config has no `layer_types`, the first layer slides and every second has no window."""
    mixer, mlp, norm = mixers(config)
    rope = rope_from_config(config, mixer.head_dim, max_model_len)
    mixer = replace(mixer, rope=rope.spec, softcap=config.optional_number("attn_logit_softcapping", 50.0))
    windows = layer_windows(config, config.optional_integer("sliding_window", 4096), lambda i: i % 2 == 0)
    spec = decoder(
        config,
        "gemma2",
        tuple(layer(attention, mlp, norm) for attention in with_windows(mixer, windows)),
        norm,
        rope.max_positions,
        tied=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        softcap=config.optional_number("final_logit_softcapping", 30.0),
    )
    return NAMES.describe(spec)


def mixers(config: ConfigReader) -> tuple[AttentionSpec, MlpSpec, NormSpec]:
    """The parts that Gemma 2 and Gemma 3 share: the attention without positions, the MLP and the norm."""
    config.refuse("use_bidirectional_attention", False)
    config = config.with_defaults(head_dim=256, num_key_value_heads=4)
    bias = config.flag("attention_bias", False)
    mixer = attention(config, qkv_bias=bias, out_bias=bias)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6), unit_offset=True)
    mlp = gated_mlp(config, config.activation("hidden_activation", "gelu_pytorch_tanh"))
    return replace(mixer, scale=config.number("query_pre_attn_scalar", 256) ** -0.5), mlp, norm


def layer(mixer: AttentionSpec, mlp: MlpSpec, norm: NormSpec) -> LayerSpec:
    """A layer with norms on both sides of each mixer."""
    return (ResidualBlockSpec(mixer, norm, norm), ResidualBlockSpec(mlp, norm, norm))
