"""GTE (https://arxiv.org/abs/2407.19669), NewModel in its own code: BERT with rope and a gated MLP."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...models.config import ConfigReader
from ...models.module_tensors import fused_qkv
from ...models.rope import rope_from_config
from ...models.spec import MlpSpec, RopeSpec
from ...models.tensor_ref import TensorRef
from ..model import EmbeddingSpec, EncoderModel
from .parts import EMBEDDINGS, GATED_LAYER, Layout, encoder, head, layer_norm, post_norm_layer, two_way

_HEAD = {"head.dense": "pooler.dense", "head.out": "classifier"}
_MODULES = {**EMBEDDINGS, **GATED_LAYER, **_HEAD}


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """GTE. There may be no token types."""
    for name, harmless in (("position_embedding_type", "rope"), ("layer_norm_type", "layer_norm"), ("pack_qkv", True)):
        config.refuse(name, harmless)
    config.refuse("logn_attention_scale", False)
    norm, attention = layer_norm(config), two_way(config, bias=True)
    size = config.integer("intermediate_size")
    mlp = MlpSpec(size, config.activation("hidden_act", "gelu"), gated=True, down_bias=True)
    own = {
        **EMBEDDINGS,
        **fused_qkv("attention.qkv_proj", attention.q_size),
        "o": "attention.o_proj",
        "attention_sum_norm": "attn_ln",
        "up.weight": TensorRef("mlp.up_gate_proj.weight", rows=(0, size)),
        "gate.weight": TensorRef("mlp.up_gate_proj.weight", rows=(size, 2 * size)),
        "down": "mlp.down_proj",
        "mlp_sum_norm": "mlp_ln",
        **_HEAD,
    }
    types = 0 if config.raw("type_vocab_size") == 0 else config.integer("type_vocab_size", 1)
    return encoder(
        config.integer("hidden_size"),
        (post_norm_layer(replace(attention, rope=_rope(config, attention.head_dim)), mlp, norm),)
        * config.num_layers("num_hidden_layers"),
        EmbeddingSpec(config.integer("vocab_size"), num_types=types, norm=norm),
        [Layout(_MODULES, "layers.", ("", "gte.")), Layout(own, "encoder.layer.", ("", "new.", "gte."))],
        head=head(architecture, config, "tanh"),
        max_length=config.integer("max_position_embeddings", 8192),
    )


def _rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """The rope. `ntk` in its own code is a larger base, and all frequencies lower by the same factor."""
    config, scaling = (
        config.with_defaults(rope_theta=160_000.0, max_position_embeddings=8192),
        config.raw("rope_scaling"),
    )
    if not isinstance(scaling, dict) or scaling.get("type") != "ntk":
        return rope_from_config(config, head_dim, None).spec
    parameters = ConfigReader(scaling, "config.json: rope_scaling")
    parameters.refuse("mixed_b")
    factor = parameters.number("factor")
    base = config.number("rope_theta") * factor
    table = base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim) / factor ** (2 / head_dim)
    return RopeSpec(tuple(table.astype(np.float32).tolist()))
