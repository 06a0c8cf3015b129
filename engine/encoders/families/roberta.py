"""RoBERTa (https://arxiv.org/abs/1907.11692), XLM-RoBERTa and CamemBERT: BERT with positions after the padding's id."""

from __future__ import annotations

from ...models.config import ConfigReader
from ..model import EmbeddingSpec, EncoderModel
from . import jina_v3
from .parts import (
    BERT_LAYER,
    CLASSIFIER,
    EMBEDDINGS,
    TOKEN_CLASSIFIER,
    WORDS_HEAD,
    Layout,
    encoder,
    head,
    head_modules,
    layer_norm,
    plain_mlp,
    post_norm_layer,
    two_way,
)


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """Any of them."""
    if config.raw("position_embedding_type") == "rotary" and architecture == "XLMRobertaModel":
        return jina_v3.model(architecture, config)
    config.refuse("position_embedding_type", "absolute")
    config.refuse("is_decoder", False)
    config.refuse("lora_adaptations")
    norm = layer_norm(config, eps=1e-5)
    padding = config.raw("pad_token_id")
    if padding is None or isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise config.error("pad_token_id", "an integer from 0 on: positions begin after it")
    embedding = EmbeddingSpec(
        config.integer("vocab_size"),
        num_positions=config.integer("max_position_embeddings"),
        num_types=config.integer("type_vocab_size", 2),
        first_position=padding + 1,
        padding_id=padding,
        norm=norm,
    )
    modules = head_modules(architecture, CLASSIFIER, TOKEN_CLASSIFIER, WORDS_HEAD)
    return encoder(
        config.integer("hidden_size"),
        (post_norm_layer(two_way(config, bias=True), plain_mlp(config), norm),)
        * config.num_layers("num_hidden_layers"),
        embedding,
        [Layout({**EMBEDDINGS, **BERT_LAYER, **modules}, "encoder.layer.", ("", "roberta."))],
        head=head(architecture, config, "tanh", words=("gelu", norm)),
    )
