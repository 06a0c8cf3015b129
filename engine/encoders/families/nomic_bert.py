"""NomicBERT (https://arxiv.org/abs/2402.01613): BERT with rope and a gated MLP, without biases."""

from __future__ import annotations

from dataclasses import replace

from ...media.families.towers import fused_qkv
from ...models.config import ConfigReader
from ...models.rope import rope_from_config
from ...models.spec import MlpSpec
from ..model import EmbeddingSpec, EncoderModel
from .parts import EMBEDDINGS, GATED_LAYER, Layout, encoder, layer_norm, post_norm_layer, two_way

# As the model's own code has them, and as transformers has them since 5.4.
_OWN_FIELDS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
_MODULES = {**EMBEDDINGS, **GATED_LAYER}


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """NomicBERT."""
    if config.raw("n_embd") is not None:
        config = _from_own(config)
    hidden = config.integer("hidden_size")
    config = config.with_defaults(rope_theta=1000.0, max_position_embeddings=2048)
    norm, attention = layer_norm(config), two_way(config, bias=False)
    rope = rope_from_config(config, attention.head_dim, None)
    mlp = MlpSpec(config.integer("intermediate_size"), config.activation("hidden_act", "silu"), gated=True)
    own = {
        **_MODULES,
        **fused_qkv("attn.Wqkv", attention.q_size),
        "embedding_norm": "emb_ln",
        "o": "attn.out_proj",
        "attention_sum_norm": "norm1",
        "gate": "mlp.fc12",
        "up": "mlp.fc11",
        "down": "mlp.fc2",
        "mlp_sum_norm": "norm2",
    }
    prefixes = ("", "nomic_bert.")
    return encoder(
        hidden,
        (post_norm_layer(replace(attention, rope=rope.spec), mlp, norm),) * config.num_layers("num_hidden_layers"),
        EmbeddingSpec(config.integer("vocab_size"), num_types=config.integer("type_vocab_size", 2), norm=norm),
        [Layout(_MODULES, "layers.", prefixes), Layout(own, "encoder.layers.", ("", "bert."))],
        max_length=rope.max_positions,
    )


def _from_own(config: ConfigReader) -> ConfigReader:
    """The config with transformers' fields. Longer texts than in training would need another rope."""
    for name in ("num_experts", "rotary_scaling_factor", "rotary_emb_scale_base"):
        config.refuse(name, 0)
    for name in ("prenorm", "parallel_block", "use_rms_norm", "rotary_emb_interleaved", "qkv_proj_bias"):
        config.refuse(name, False)
    for name in ("mlp_fc1_bias", "mlp_fc2_bias"):
        config.refuse(name, False)
    config.refuse("rotary_emb_fraction", 1)
    activation = config.raw("activation_function")
    if activation not in _ACTIVATIONS:
        raise config.error("activation_function", " or ".join(_ACTIVATIONS))
    return config.with_fields(
        **{name: config.raw(own) for name, own in _OWN_FIELDS.items()},
        hidden_act=_ACTIVATIONS[activation],
        max_position_embeddings=config.integer("max_trained_positions", 2048),
    )
