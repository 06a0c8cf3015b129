"""MPNet (https://arxiv.org/abs/2004.09297): BERT with positions from 2 on, and biases by distance."""

from __future__ import annotations

import math
from dataclasses import replace

from ...models.config import ConfigReader
from ...models.spec.attention import bias_distances
from ...models.tensor_ref import TensorRef
from ..model import EmbeddingSpec, EncoderModel
from .parts import (
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

_PADDING = 1  # whatever the config says
_BUCKETS, _LONGEST = 32, 128
_MODULES = {
    **EMBEDDINGS,
    "q": "attention.attn.q",
    "k": "attention.attn.k",
    "v": "attention.attn.v",
    "o": "attention.attn.o",
    "attention_sum_norm": "attention.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_sum_norm": "output.LayerNorm",
    "distance_bias": "",
}


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """MPNet. All layers have the same biases."""
    config.refuse("relative_attention_num_buckets", _BUCKETS)  # transformers takes 32, whatever it says
    norm, count = layer_norm(config), config.num_layers("num_hidden_layers")
    attention = replace(two_way(config, bias=True), bias_span=_LONGEST)
    embedding = EmbeddingSpec(
        config.integer("vocab_size"),
        num_positions=config.integer("max_position_embeddings", 512),
        first_position=_PADDING + 1,
        padding_id=_PADDING,
        norm=norm,
    )
    made = encoder(
        config.integer("hidden_size"),
        (post_norm_layer(attention, plain_mlp(config), norm),) * count,
        embedding,
        [
            Layout(
                {**_MODULES, **head_modules(architecture, CLASSIFIER, TOKEN_CLASSIFIER, WORDS_HEAD)},
                "encoder.layer.",
                ("", "mpnet."),
            )
        ],
        head=head(architecture, config, "tanh", words=("gelu", norm)),
    )
    buckets = tuple(map(_bucket, bias_distances(_LONGEST)))
    name = "encoder.relative_attention_bias.weight"
    biases = tuple(
        TensorRef(f"{prefix}{name}", transpose=True, columns=buckets, flat=True) for prefix in ("", "mpnet.")
    )
    return replace(
        made, tensors={**made.tensors, **{f"layers.{index}.distance_bias": biases for index in range(count)}}
    )


def _bucket(distance: int) -> int:
    """The bucket of a key that lies `distance` behind its query: half of them for each direction, and of these half
    for a distance each and the rest by its logarithm (T5, https://arxiv.org/abs/1910.10683).
    """
    half = _BUCKETS // 2
    exact, away = half // 2, abs(distance)
    if away >= exact:
        away = min(exact + int(math.log(away / exact) / math.log(_LONGEST / exact) * (half - exact)), half - 1)
    return away + (half if distance > 0 else 0)
