"""StarCoder 2 (https://arxiv.org/abs/2402.19173): Llama with LayerNorm, biases and a plain MLP."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import MlpSpec, NormSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, pre_norm_layers, uniform_layers

ARCHITECTURES = {"Starcoder2ForCausalLM": Listing("StarCoder 2")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """StarCoder 2."""
    config = config.with_defaults(num_key_value_heads=2)
    bias = config.flag("use_bias", True)
    heads = attention(config, qkv_bias=bias, out_bias=bias)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    window = config.optional_integer("sliding_window")
    num_layers = uniform_layers(config, "full_attention" if window is None else "sliding_attention")
    activation = config.activation("hidden_act", "gelu_pytorch_tanh")
    mlp = MlpSpec(config.integer("intermediate_size"), activation, gated=False, bias=bias)
    norm = NormSpec("layer", config.number("norm_epsilon", 1e-5), bias=True)
    mixer = replace(heads, rope=rope.spec, sliding_window=window)
    layers = pre_norm_layers([mixer] * num_layers, mlp, norm)
    names = llama_names({**PRE_NORMS, "up": "mlp.c_fc", "down": "mlp.c_proj"})
    return names.describe(decoder(config, "starcoder2", layers, norm, rope.max_positions, tied=True))
