"""How an encoder in a GGUF file computes: its metadata in the words of config.json, and where its tensors lie.

The keys and names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...errors import ModelError
from ...models.module_tensors import fused_qkv
from ...models.overrides import overridden
from ...models.spec import AttentionSpec, ExpertsSpec, LayerSpec, MlpSpec, ProjectionSpec, TowerSpec, tower_shapes
from ...models.tensor_ref import TensorRef
from ...weights.gguf.fields import Fields
from ...weights.gguf.reader import GgufFile
from ..families import encoder_model
from ..families.jina_bert import FOR_CODE
from ..families.parts import Layout
from ..model import EncoderModel
from ..options import Convert
from .decoders import as_reranker, decoder_in, pair_texts_in
from .norms import with_whole_norms

Config = dict[str, Any]

_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
_NONE, _RANK = 0, 4  # the other values of pooling_type: no pooling, and a classifier
_WORDS, _OUT, _HEAD = "token_embd.weight", "cls.output.weight", "cls.weight"
_MAX_LENGTH = 10**6
_PADDING = 1  # positions in a config count from behind this id; in a file they do not
_DISTILBERT_EPS = 1e-12
_MODULES: dict[str, str | TensorRef] = {
    "words": _WORDS,
    "positions": "position_embd.weight",
    "types": "token_types.weight",
    "embedding_norm": "token_embd_norm",
    "final_norm": "output_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "attention_sum_norm": "attn_output_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "mlp_sum_norm": "layer_output_norm",
    "router": "ffn_gate_inp",
    "experts_sum_norm": "layer_output_norm",
    "head.dense": "cls",
    "head.norm": "cls.norm",
    "head.out": "cls.output",
    "dense.0": "dense_2",
    "dense.1": "dense_3",
}


class GgufEncoder(NamedTuple):
    """An encoder, and what its file says of its inputs and outputs. A classifier has `labels`. Without them `pooling`
    is empty if the file does not say how one vector is made of those of the tokens. The Dense modules behind the
    pooling are projections of the tower, `dense.0` and `dense.1`. `pair_texts` stand around the texts of a pair.
    """

    architecture: str
    model: EncoderModel
    labels: tuple[str, ...]
    pooling: tuple[str, ...]
    max_length: int
    pad_token_id: int | None
    pair_texts: tuple[str, str, str] | None = None


def encoder_in(file: GgufFile, overrides: Mapping[str, Any] | None = None, convert: Convert = "auto") -> GgufEncoder:
    """The encoder, whose config has `overrides` in place of its own fields. A decoder is one if its file says how it
    pools, or to `convert` it.

    Raises ModelError, naming the file and the key or the tensor, for what is not supported.
    """
    name = Fields(file).text("general.architecture")
    fields = Fields(file, f"{name}.")
    pooling = _pooling(file, fields)
    if name not in ARCHITECTURES and pooling == () and convert != "embed":
        raise ModelError(
            f"{file.path} is no embedding model that is supported: these are of the GGUF architectures "
            f"{', '.join(ARCHITECTURES)}, or have a pooling_type; embed with a chat model by converting it "
            "(--convert embed)"
        )
    length = fields.integer("context_length")
    if length > _MAX_LENGTH:
        raise fields.error("context_length", f"at most {_MAX_LENGTH}")
    labels, pair_texts = tuple[str, ...](), None
    if name not in ARCHITECTURES:
        model = decoder_in(file, fields, overrides)
        if pooling is None:
            model, labels, pair_texts = as_reranker(fields, model), ("LABEL_0",), pair_texts_in(file)
        pooling = pooling or ("lasttoken",)
    else:
        model, labels = _encoder(file, fields, overrides, classifies=pooling is None)
    return GgufEncoder(
        name,
        model,
        labels,
        () if labels else pooling or (),
        min(length, model.max_length or length),
        Fields(file, "tokenizer.ggml.").optional_integer("padding_token_id"),
        pair_texts,
    )


def _encoder(
    file: GgufFile, fields: Fields, overrides: Mapping[str, Any] | None, *, classifies: bool
) -> tuple[EncoderModel, tuple[str, ...]]:
    """The encoder of a file, and a classifier's labels."""
    name = Fields(file).text("general.architecture")
    if fields.flag("attention.causal", False):
        raise fields.error("attention.causal", "false in an encoder")
    config = _shared(file, fields)
    config |= ARCHITECTURES[name](file, fields, config)
    labels = _labels(file, fields, config["hidden_size"]) if classifies else ()
    if labels:
        architecture = config["architectures"][0].removesuffix("Model")
        config |= {"architectures": [f"{architecture}ForSequenceClassification"], "id2label": dict(enumerate(labels))}
    try:
        model = encoder_model(overridden(config, overrides, None, None))
    except ModelError as error:
        raise ModelError(f"{file.path}, whose metadata was read as a config.json: {error}") from error
    if model is None:
        raise ModelError(f"{file.path}: classifiers of architecture {name} are not supported")
    return _as_stored(file, replace(model, tower=_with_dense(file, model.tower))), labels


def _pooling(file: GgufFile, fields: Fields) -> tuple[str, ...] | None:
    """The modes; None for a classifier. Converters do not write the type of most classifiers."""
    kind = fields.optional_integer("pooling_type")
    if kind == _RANK or (kind is None and _OUT in file.tensors):
        return None
    if kind in (None, _NONE):
        return ()
    if kind not in _POOLING:
        raise fields.error("pooling_type", f"{_NONE}, {_RANK} or one of {', '.join(map(str, _POOLING))}")
    return (_POOLING[kind],)


def _shared(file: GgufFile, fields: Fields) -> Config:
    """What all have. Sizes are bounded by those of tensors, which are there."""
    hidden = fields.integer("embedding_length")
    words = _table(file, _WORDS, hidden)
    return {
        "vocab_size": words,
        "hidden_size": hidden,
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": fields.integer("attention.head_count"),
        "intermediate_size": fields.integer("feed_forward_length"),
        "max_position_embeddings": fields.integer("context_length"),
    }


def _table(file: GgufFile, name: str, width: int) -> int:
    """How many rows a table has. Raises ModelError if it is not there or not as wide."""
    tensor = file.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{file.path} has no tensor {name}, which an embedding model of this kind needs")
    if len(tensor.shape) != 2 or tensor.shape[1] != width:
        raise ModelError(f"{tensor.origin} has shape {tensor.shape}, but the model needs rows of {width} elements")
    return tensor.shape[0]


def _number(fields: Fields, key: str) -> float | None:
    """A number as config.json had it: the shortest with the same float32."""
    value = fields.optional_number(key)
    return None if value is None else float(str(np.float32(value)))


def _layer_norm(fields: Fields) -> float:
    fields.number("attention.layer_norm_epsilon")
    return _number(fields, "attention.layer_norm_epsilon") or 0.0


def _no_scaling(fields: Fields) -> None:
    if fields.optional_text("rope.scaling.type") not in (None, "none"):
        raise fields.error("rope.scaling.type", "none")


def _bert(file: GgufFile, fields: Fields, config: Config) -> Config:
    """BERT, and RoBERTa and XLM-R, whose positions before the first are cut off. DistilBERT has no token types."""
    hidden, eps = config["hidden_size"], _layer_norm(fields)
    given = {"max_position_embeddings": _table(file, "position_embd.weight", hidden), "layer_norm_eps": eps}
    if "token_types.weight" in file.tensors:
        return {**given, "architectures": ["BertModel"], "type_vocab_size": _table(file, "token_types.weight", hidden)}
    if eps != _DISTILBERT_EPS:
        raise fields.error("attention.layer_norm_epsilon", f"{_DISTILBERT_EPS} in a model without token types")
    return {
        **given,
        "architectures": ["DistilBertModel"],
        "dim": hidden,
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "hidden_dim": config["intermediate_size"],
    }


def _nomic_bert(file: GgufFile, fields: Fields, config: Config) -> Config:
    _no_scaling(fields)
    return {
        "architectures": ["NomicBertModel"],
        "layer_norm_eps": _layer_norm(fields),
        "type_vocab_size": _table(file, "token_types.weight", config["hidden_size"]),
        "rope_theta": _number(fields, "rope.freq_base"),
    }


def _nomic_bert_moe(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Version 2, in the words of its own code. Files lack the bias of the experts' sum."""
    _no_scaling(fields)
    return {
        "architectures": ["NomicBertModel"],
        "n_embd": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "layer_norm_epsilon": _layer_norm(fields),
        "rotary_emb_base": _number(fields, "rope.freq_base"),
        "max_trained_positions": config["max_position_embeddings"],
        "type_vocab_size": _table(file, "token_types.weight", config["hidden_size"]),
        "activation_function": "gelu",
        "qkv_proj_bias": True,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "moe_every_n_layers": fields.integer("moe_every_n_layers"),
        "num_experts": fields.integer("expert_count"),
        "moe_top_k": fields.integer("expert_used_count"),
    }


def _jina_bert(file: GgufFile, fields: Fields, config: Config) -> Config:
    """Also the one for code, which has norms of queries and keys."""
    for_code = "blk.0.attn_q_norm.weight" in file.tensors
    if for_code and "blk.0.ffn_gate.weight" not in file.tensors:
        raise ModelError(
            f"{file.path} has gate and up in one matrix, whose order files of this model do not say: take another, "
            "or serve the original model's folder"
        )
    return {
        "_name_or_path": FOR_CODE if for_code else None,
        "architectures": ["JinaBertModel"],
        "layer_norm_eps": _layer_norm(fields),
        "type_vocab_size": _table(file, "token_types.weight", config["hidden_size"]),
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
    }


def _jina_v3(file: GgufFile, fields: Fields, config: Config) -> Config:
    """jina-embeddings-v3 without its adapters, which are files of their own."""
    _no_scaling(fields)
    return {
        "architectures": ["XLMRobertaModel"],
        "position_embedding_type": "rotary",
        "layer_norm_eps": _layer_norm(fields),
        "type_vocab_size": _table(file, "token_types.weight", config["hidden_size"]),
        "rotary_emb_base": _number(fields, "rope.freq_base"),
        "pad_token_id": _PADDING,
        "max_position_embeddings": config["max_position_embeddings"] + _PADDING + 1,
    }


def _modern_bert(file: GgufFile, fields: Fields, config: Config) -> Config:
    _no_scaling(fields)
    return {
        "architectures": ["ModernBertModel"],
        "norm_eps": _layer_norm(fields),
        "norm_bias": "token_embd_norm.bias" in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "classifier_bias": "cls.bias" in file.tensors,
        # Files that do not say it are older than models whose classifiers take the first token.
        "classifier_pooling": "cls" if fields.optional_integer("classifier.pooling_type") == 2 else "mean",
        "hidden_activation": fields.optional_text("hidden_activation"),
        "local_attention": fields.integer("attention.sliding_window"),
        "global_attn_every_n_layers": fields.integer("attention.sliding_window_pattern", 3),
        "global_rope_theta": _number(fields, "rope.freq_base"),
        "local_rope_theta": _number(fields, "rope.freq_base_swa"),
    }


def _gemma(file: GgufFile, fields: Fields, config: Config) -> Config:
    """EmbeddingGemma. The window is that of its config.json, of which half lies before a token."""
    _no_scaling(fields)
    head_dim = fields.integer("attention.key_length")
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("attention.value_length", f"that of the keys, {head_dim}")
    fields.number("attention.layer_norm_rms_epsilon")
    return {
        "architectures": ["Gemma3TextModel"],
        "use_bidirectional_attention": True,
        "head_dim": head_dim,
        "query_pre_attn_scalar": head_dim,
        "num_key_value_heads": fields.integer("attention.head_count_kv"),
        "rms_norm_eps": _number(fields, "attention.layer_norm_rms_epsilon"),
        "sliding_window": fields.integer("attention.sliding_window"),
        "sliding_window_pattern": fields.integer("attention.sliding_window_pattern", 6),
        "rope_theta": _number(fields, "rope.freq_base"),
        "rope_local_base_freq": _number(fields, "rope.freq_base_swa"),
    }


ARCHITECTURES: dict[str, Callable[[GgufFile, Fields, Config], Config]] = {
    "bert": _bert,
    "nomic-bert": _nomic_bert,
    "nomic-bert-moe": _nomic_bert_moe,
    "jina-bert-v2": _jina_bert,
    "jina-bert-v3": _jina_v3,
    "modern-bert": _modern_bert,
    "gemma-embedding": _gemma,
}
"""What each `general.architecture` says beside the shared fields."""


def _labels(file: GgufFile, fields: Fields, hidden: int) -> tuple[str, ...]:
    """A classifier's. Raises ModelError for a head that is not whole."""
    count = _table(file, _OUT, hidden)
    if _HEAD not in file.tensors:
        raise ModelError(
            f"{file.path} has no tensor {_HEAD}: converters leave out the pooler of BERT's classifiers, without which "
            "scores are not the model's; serve the original model's folder"
        )
    if fields.raw("classifier.output_labels") is None:
        return tuple(f"LABEL_{index}" for index in range(count))
    labels = fields.texts("classifier.output_labels")
    if len(labels) != count:
        raise fields.error("classifier.output_labels", f"{count} labels, one for each row of {_OUT}")
    return tuple(labels)


def _with_dense(file: GgufFile, tower: TowerSpec) -> TowerSpec:
    """With the Dense modules behind the pooling, which have neither biases nor activations."""
    projections = []
    for index, name in enumerate(("dense_2.weight", "dense_3.weight")):
        if name in file.tensors:
            tensor = file.tensors[name]
            if len(tensor.shape) != 2:
                raise ModelError(f"{tensor.origin} has shape {tensor.shape}, but a matrix is needed")
            outputs, inputs = tensor.shape
            projections.append((f"dense.{index}", ProjectionSpec(inputs, outputs)))
    return replace(tower, projections=(*tower.projections, *projections))


def _as_stored(file: GgufFile, model: EncoderModel) -> EncoderModel:
    """The same model with its tensors where the file has them."""
    attention, mlp = model.tower.layers[0][0].mixer, model.tower.layers[0][-1].mixer
    modules = _MODULES | {f"skips.{index}": f"blk.{index // 2}.attn_norm_2" for index in model.skips}
    if "blk.0.attn_qkv.weight" in file.tensors:
        assert isinstance(attention, AttentionSpec)
        modules |= fused_qkv("attn_qkv", attention.q_size)
    if isinstance(mlp, MlpSpec) and mlp.gated and "blk.0.ffn_gate.weight" not in file.tensors:
        size = mlp.intermediate_size
        for kind in ("weight", "bias"):
            modules[f"gate.{kind}"] = TensorRef(f"ffn_up.{kind}", rows=(0, size))
            modules[f"up.{kind}"] = TensorRef(f"ffn_up.{kind}", rows=(size, 2 * size))
    model = replace(model, tower=replace(model.tower, layers=tuple(map(_without_sum_bias, model.tower.layers))))
    experts = [block.mixer for layer in model.tower.layers for block in layer if isinstance(block.mixer, ExpertsSpec)]
    for number in range(experts[0].num_experts if experts else 0):
        for part, rows in (("up", experts[0].intermediate_size), ("down", model.tower.hidden_size)):
            place = TensorRef(f"ffn_{part}_exps.weight", rows=(number * rows, (number + 1) * rows))
            modules[f"experts.{number}.{part}.weight"] = place
    names = [*tower_shapes(model.tower), *model.embedding.tables]
    layout = Layout(modules, "blk.", in_parts=2 if model.skips else 1)
    return replace(with_whole_norms(model), tensors=layout.places(names))


def _without_sum_bias(layer: LayerSpec) -> LayerSpec:
    return tuple(
        replace(block, mixer=replace(block.mixer, sum_bias=False)) if isinstance(block.mixer, ExpertsSpec) else block
        for block in layer
    )
