"""DistilBERT (https://arxiv.org/abs/1910.01108): BERT without token types, with names of its own."""

from __future__ import annotations

from ...models.config import ConfigReader
from ..model import EmbeddingSpec, EncoderModel
from .parts import EMBEDDINGS, Layout, encoder, head, head_modules, layer_norm, plain_mlp, post_norm_layer, two_way

_MODULES = {
    **EMBEDDINGS,
    "q": "attention.q_lin",
    "k": "attention.k_lin",
    "v": "attention.v_lin",
    "o": "attention.out_lin",
    "attention_sum_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "mlp_sum_norm": "output_layer_norm",
}
_CLASSIFIER = {"head.dense": "pre_classifier", "head.out": "classifier"}
_WORDS = {"head.dense": "vocab_transform", "head.norm": "vocab_layer_norm", "head.out": "vocab_projector"}
_FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """DistilBERT. The epsilon of its norms is in no config."""
    config = config.with_fields(**{name: config.raw(own) for name, own in _FIELDS.items()}, layer_norm_eps=None)
    config = config.with_defaults(hidden_size=768, num_hidden_layers=6, num_attention_heads=12, intermediate_size=3072)
    norm = layer_norm(config)
    embedding = EmbeddingSpec(
        config.integer("vocab_size"), num_positions=config.integer("max_position_embeddings", 512), norm=norm
    )
    modules = head_modules(architecture, _CLASSIFIER, _CLASSIFIER, _WORDS)
    return encoder(
        config.integer("hidden_size"),
        (post_norm_layer(two_way(config, bias=True), plain_mlp(config), norm),)
        * config.num_layers("num_hidden_layers"),
        embedding,
        [Layout({**_MODULES, **modules}, "transformer.layer.", ("", "distilbert."))],
        head=head(architecture, config, "relu", words=(config.activation("hidden_act", "gelu"), norm)),
    )
