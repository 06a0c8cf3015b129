"""JinaBERT 2 (https://arxiv.org/abs/2310.19923): BERT with ALiBi in both directions and a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from ...models.config import ConfigReader
from ...models.families.parts import alibi_slopes
from ...models.spec import Activation, MlpSpec
from ...models.tensor_ref import TensorRef
from ..model import EmbeddingSpec, EncoderModel
from .parts import BERT_LAYER, EMBEDDINGS, Layout, encoder, layer_norm, post_norm_layer, two_way

_ACTIVATIONS: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """JinaBERT."""
    config.refuse("is_decoder", False)
    if config.raw("position_embedding_type") != "alibi":
        raise config.error("position_embedding_type", "alibi")
    activation = config.raw("feed_forward_type")
    if activation not in _ACTIVATIONS:
        raise config.error("feed_forward_type", " or ".join(_ACTIVATIONS))
    size, norm = config.integer("intermediate_size"), layer_norm(config)
    attention = replace(two_way(config, bias=True), alibi_slopes=alibi_slopes(config, "num_attention_heads"))
    mlp = MlpSpec(size, _ACTIVATIONS[activation], gated=True, down_bias=True)
    modules = {
        **EMBEDDINGS,
        **BERT_LAYER,
        "gate.weight": TensorRef("mlp.gated_layers.weight", rows=(0, size)),
        "up.weight": TensorRef("mlp.gated_layers.weight", rows=(size, 2 * size)),
        "down": "mlp.wo",
        "mlp_sum_norm": "mlp.layernorm",
    }
    return encoder(
        config.integer("hidden_size"),
        (post_norm_layer(attention, mlp, norm),) * config.num_layers("num_hidden_layers"),
        EmbeddingSpec(config.integer("vocab_size"), num_types=config.integer("type_vocab_size", 2), norm=norm),
        [Layout(modules, "encoder.layer.", ("", "bert."))],
        max_length=config.integer("max_position_embeddings"),
    )
