"""JinaBERT 2 (https://arxiv.org/abs/2310.19923): BERT with ALiBi in both directions and a gated MLP."""

from __future__ import annotations

from dataclasses import replace

from ...models.config import ConfigReader
from ...models.families.parts import alibi_slopes
from ...models.spec import Activation, MlpSpec, ResidualBlockSpec
from ...models.tensor_ref import TensorRef
from ..model import EmbeddingSpec, EncoderModel, SkipSpec
from .parts import BERT_LAYER, EMBEDDINGS, Layout, Modules, encoder, layer_norm, post_norm_layer, two_way

FOR_CODE = "jina-bert-v2-qk-post-norm"
_PREFIXES = ("", "bert.")
_ACTIVATIONS: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """JinaBERT, and the one for code, which has norms of queries, keys and once more behind the attention."""
    config.refuse("is_decoder", False)
    if config.raw("position_embedding_type") != "alibi":
        raise config.error("position_embedding_type", "alibi")
    activation = config.raw("feed_forward_type")
    if activation not in _ACTIVATIONS:
        raise config.error("feed_forward_type", " or ".join(_ACTIVATIONS))
    size, norm = config.integer("intermediate_size"), layer_norm(config)
    attention = replace(two_way(config, bias=True), alibi_slopes=alibi_slopes(config, "num_attention_heads"))
    mlp = MlpSpec(size, _ACTIVATIONS[activation], gated=True, down_bias=True)
    hidden, count, longest = (
        config.integer("hidden_size"),
        config.num_layers("num_hidden_layers"),
        config.integer("max_position_embeddings"),
    )
    embedding = EmbeddingSpec(config.integer("vocab_size"), num_types=config.integer("type_vocab_size", 2), norm=norm)
    if not is_for_code(config):
        modules = {
            **EMBEDDINGS,
            **BERT_LAYER,
            **_halves("mlp.gated_layers", size, "gate", "up"),
            "down": "mlp.wo",
            "mlp_sum_norm": "mlp.layernorm",
        }
        layers = (post_norm_layer(attention, mlp, norm),) * count
        return encoder(hidden, layers, embedding, [Layout(modules, "encoder.layer.", _PREFIXES)], max_length=longest)
    attention = replace(attention, qk_norm=norm, qk_norm_over="whole")
    modules = {
        **EMBEDDINGS,
        **BERT_LAYER,
        "q_norm": "attention.self.layer_norm_q",
        "k_norm": "attention.self.layer_norm_k",
        **_halves("mlp.up_gated_layer", size, "up", "gate"),
        "down": "mlp.down_layer",
        "mlp_sum_norm": "layer_norm_2",
        **{f"skips.{2 * index}": f"encoder.layer.{index}.layer_norm_1" for index in range(count)},
    }
    # The attention and the MLP are a layer each, because what the attention reads is added once more to its norm.
    return encoder(
        hidden,
        ((ResidualBlockSpec(attention, sum_norm=norm),), (ResidualBlockSpec(mlp, sum_norm=norm),)) * count,
        embedding,
        [Layout(modules, "encoder.layer.", _PREFIXES, in_parts=2)],
        max_length=longest,
        skips={2 * index: SkipSpec(norm) for index in range(count)},
    )


def is_for_code(config: ConfigReader) -> bool:
    """Whether a config is that of jina-embeddings-v2-base-code, which only the place of its own code tells."""
    return FOR_CODE in f"{config.raw('auto_map')} {config.raw('_name_or_path')}"


def _halves(module: str, size: int, *names: str) -> Modules:
    return {
        f"{name}.weight": TensorRef(f"{module}.weight", rows=(i * size, (i + 1) * size)) for i, name in enumerate(names)
    }
