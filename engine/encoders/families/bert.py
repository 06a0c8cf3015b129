"""BERT (https://arxiv.org/abs/1810.04805): learned positions, two token types, norms behind the sums."""

from __future__ import annotations

from ...models.config import ConfigReader
from ..model import EmbeddingSpec, EncoderModel
from .parts import (
    BERT_LAYER,
    EMBEDDINGS,
    Layout,
    encoder,
    head,
    head_modules,
    layer_norm,
    plain_mlp,
    post_norm_layer,
    two_way,
)

_CLASSIFIER = {"head.dense": "pooler.dense", "head.out": "classifier"}
_WORDS = {
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.out": "cls.predictions.decoder",
    "head.bias": "cls.predictions.bias",
}


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """BERT; a classifier takes what its pooler makes of the first token. ColBERT is BERT too, or another model."""
    if not architecture.startswith("Bert"):
        config.refuse("model_type", "bert")
    config.refuse("position_embedding_type", "absolute")
    config.refuse("is_decoder", False)
    norm = layer_norm(config)
    layer = post_norm_layer(two_way(config, bias=True), plain_mlp(config), norm)
    embedding = EmbeddingSpec(
        config.integer("vocab_size"),
        num_positions=config.integer("max_position_embeddings", 512),
        num_types=config.integer("type_vocab_size", 2),
        norm=norm,
    )
    modules = head_modules(architecture, _CLASSIFIER, _CLASSIFIER, _WORDS)
    return encoder(
        config.integer("hidden_size"),
        (layer,) * config.num_layers("num_hidden_layers"),
        embedding,
        [Layout({**EMBEDDINGS, **BERT_LAYER, **modules}, "encoder.layer.", ("", "bert."))],
        head=head(architecture, config, "tanh", words=(config.activation("hidden_act", "gelu"), norm)),
    )
