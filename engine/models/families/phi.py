"""Phi-1, Phi-1.5 and Phi-2 (https://arxiv.org/abs/2306.11644): attention and MLP side by side after one LayerNorm.

Biases everywhere, also on the head; a part of each head is rotated.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import MlpSpec, NormSpec, ParallelSpec, ResidualBlockSpec
from .listing import Listing
from .names import CheckpointNames
from .parts import attention, decoder, uniform_layers

ARCHITECTURES = {"PhiForCausalLM": Listing("Phi-1, Phi-1.5, Phi-2")}

_NAMES = CheckpointNames(
    base="model.",
    top={
        "embed.weight": "embed_tokens.weight",
        "final_norm.weight": "final_layernorm.weight",
        "final_norm.bias": "final_layernorm.bias",
    },
    layers="layers",
    modules={
        "parallel_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.dense",
        "q_norm": "self_attn.q_layernorm",
        "k_norm": "self_attn.k_layernorm",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    },
)


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Phi. It may normalize queries and keys."""
    config = config.with_fields(head_dim=None).with_defaults(partial_rotary_factor=0.5)
    config = config.with_defaults(max_position_embeddings=2048)
    heads = attention(config, qkv_bias=True, out_bias=True)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-5), bias=True)
    mixer = replace(heads, rope=rope.spec, qk_norm=norm if config.flag("qk_layernorm", False) else None)
    activation = config.activation("hidden_act", "gelu_new")
    mlp = MlpSpec(config.integer("intermediate_size"), activation, gated=False, bias=True)
    layer = (ResidualBlockSpec(ParallelSpec((ResidualBlockSpec(mixer), ResidualBlockSpec(mlp))), norm),)
    layers = (layer,) * uniform_layers(config)
    return _NAMES.describe(decoder(config, "phi", layers, norm, rope.max_positions, head_bias=True))
