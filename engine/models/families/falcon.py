"""Falcon (https://arxiv.org/abs/2311.16867): the first architecture (7B), and the new one with grouped heads (40B).

The RW models (https://arxiv.org/abs/2306.01116) have ALiBi instead of rope.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...errors import ModelError
from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec, ParallelSpec, ResidualBlockSpec
from ..tensor_ref import TensorRef
from .listing import Listing
from .names import CheckpointNames, fused_heads, fused_rows
from .parts import alibi_slopes, attention, decoder, uniform_layers

ARCHITECTURES = {
    "FalconForCausalLM": Listing("Falcon, Falcon-RW: the architectures of the 7B, 40B and RW models"),
}

_FUSED = "self_attention.query_key_value"
_NAMES = CheckpointNames(
    base="transformer.",
    top={
        "embed.weight": "word_embeddings.weight",
        "final_norm.weight": "ln_f.weight",
        "final_norm.bias": "ln_f.bias",
    },
    layers="h",
    modules={
        "parallel_norm": "input_layernorm",
        "o": "self_attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
)
_NORMS_OF_BRANCHES = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}
_NORMS_IN_SEQUENCE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Falcon."""
    config = config.with_fields(head_dim=None, hidden_size=config.raw("n_embed") or config.raw("hidden_size"))
    config = config.with_defaults(max_position_embeddings=2048)
    grouped, bias = config.flag("new_decoder_architecture", False), config.flag("bias", False)
    heads, fused = _heads(config, grouped, bias)
    mixer, longest = _with_positions(config, heads, max_model_len)
    hidden, activation = config.integer("hidden_size"), config.activation("activation", "gelu")
    mlp = MlpSpec(config.integer("ffn_hidden_size", 4 * hidden), activation, gated=False, bias=bias)
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias=True)
    layer, norms = _layer(config, grouped, mixer, mlp, norm)
    spec = decoder(config, "falcon", (layer,) * uniform_layers(config), norm, longest, tied=True)
    return replace(_NAMES, modules={**_NAMES.modules, **norms}).describe(spec, fused)


def _heads(config: ConfigReader, grouped: bool, bias: bool) -> tuple[AttentionSpec, dict[str, TensorRef]]:
    """The heads, and how one matrix holds them."""
    num_heads = config.integer("num_attention_heads")
    one_kv_head = not grouped and config.flag("multi_query", True)
    num_kv_heads = 1 if one_kv_head else config.integer("num_kv_heads", num_heads)
    if not grouped and not one_kv_head and num_kv_heads != num_heads:
        raise ModelError(f"config.json: num_kv_heads {num_kv_heads} without new_decoder_architecture is not supported")
    heads = attention(config.with_fields(num_key_value_heads=num_kv_heads), qkv_bias=bias, out_bias=bias)
    if one_kv_head:
        return heads, fused_rows(_FUSED, q=heads.q_size, k=heads.kv_size, v=heads.kv_size)
    return heads, fused_heads(_FUSED, num_heads // num_kv_heads, heads.head_dim)


def _with_positions(config: ConfigReader, heads: AttentionSpec, max_model_len: int | None) -> tuple[AttentionSpec, int]:
    """The attention with rope or ALiBi, and the longest context.

    Slopes are rounded to bfloat16, and added to the scores before these are scaled.
    """
    if not config.flag("alibi", False):
        rope = rope_from_config(config, heads.head_dim, max_model_len)
        return replace(heads, rope=rope.spec), rope.max_positions
    slopes = tuple(_as_bfloat16(slope) * heads.scale for slope in alibi_slopes(config, "num_attention_heads"))
    return replace(heads, alibi_slopes=slopes), config.integer("max_position_embeddings")


def _as_bfloat16(value: float) -> float:
    """The nearest number of bfloat16, of two the one whose last bit is 0."""
    bits = int(np.float32(value).view(np.uint32))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(rounded).view(np.float32))


def _layer(
    config: ConfigReader, grouped: bool, mixer: AttentionSpec, mlp: MlpSpec, norm: NormSpec
) -> tuple[LayerSpec, dict[str, str]]:
    """A layer, and what its norms are called where it has more than one."""
    in_sequence = (ResidualBlockSpec(mixer, norm), ResidualBlockSpec(mlp, norm))
    norms = config.integer("num_ln_in_parallel_attn", 2 if grouped else 1)
    if not config.flag("parallel_attn", True):
        if grouped:
            raise ModelError("config.json: parallel_attn = False with new_decoder_architecture is not supported")
        return in_sequence, _NORMS_IN_SEQUENCE
    if norms == 2 and grouped:
        return (ResidualBlockSpec(ParallelSpec(in_sequence)),), _NORMS_OF_BRANCHES
    if norms != 1:
        raise ModelError(f"config.json: num_ln_in_parallel_attn = {norms} is not supported for this architecture")
    return (ResidualBlockSpec(ParallelSpec((ResidualBlockSpec(mixer), ResidualBlockSpec(mlp))), norm),), {}
