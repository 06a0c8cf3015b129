"""DeBERTa (https://arxiv.org/abs/2006.03654) and its versions 2 and 3 (https://arxiv.org/abs/2111.09543): BERT whose
scores also have terms of what a token contains and how far away another one is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...models.config import ConfigReader
from ...models.spec import AttentionSpec, DisentangledSpec, LayerSpec
from ...models.tensor_ref import TensorRef
from ..made_weights import Made, PositionTable, Zeros
from ..model import EmbeddingSpec, EncoderModel, SkipSpec
from .parts import (
    BERT_LAYER,
    EMBEDDINGS,
    Layout,
    Modules,
    encoder,
    head,
    layer_norm,
    plain_mlp,
    post_norm_layer,
    two_way,
)

_LONGEST = 1 << 16  # distance with a row of its own
_WIDEST = 15  # convolution, in tokens; models have 3
_MODULES = {
    **EMBEDDINGS,
    **BERT_LAYER,
    "head.dense": "pooler.dense",
    "head.out": "classifier",
    "relative": "encoder.rel_embeddings",
    "relative_norm": "encoder.LayerNorm",
    "skips.0": "encoder.conv.LayerNorm",
    "skips.0.conv.weight": TensorRef("encoder.conv.conv.weight", matrix=True),
    "skips.0.conv.bias": "encoder.conv.conv.bias",
}
_OF_2: Modules = {
    "q": "attention.self.query_proj",
    "k": "attention.self.key_proj",
    "v": "attention.self.value_proj",
    "pos_k.projection": "attention.self.pos_key_proj",
    "pos_q.projection": "attention.self.pos_query_proj",
}
_SHARED = {"pos_k.projection": _OF_2["k"], "pos_q.projection": _OF_2["q"]}
_TERMS = {"c2p": "pos_k", "p2c": "pos_q"}


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """DeBERTa of any version. Some models of version 2 have a convolution beside their first layer."""
    first = not architecture.startswith("DebertaV2")
    hidden, longest = config.integer("hidden_size"), config.integer("max_position_embeddings", 512)
    config.refuse("talking_head", False)
    config.refuse("embedding_size", hidden)
    config.refuse("pooler_hidden_size", hidden)
    norm, plain = layer_norm(config, eps=1e-7), two_way(config, bias=True)
    tables = _tables(config)
    attention = replace(plain, scale=((1 + len(tables)) * plain.head_dim) ** -0.5)
    positions = _positions(config, tables, longest, has_buckets=not first)
    if positions is not None:
        attention = replace(attention, disentangled=positions)
    layer: LayerSpec = post_norm_layer(attention, plain_mlp(config), norm)
    count = config.num_layers("num_hidden_layers")
    shared = {} if first or not config.flag("share_att_key", False) else _SHARED
    modules = {**_MODULES, **(_fused(attention) if first else {**_OF_2, **shared})}
    types = config.raw("type_vocab_size")
    embedding = EmbeddingSpec(
        config.integer("vocab_size"),
        num_positions=longest if config.flag("position_biased_input", True) else 0,
        num_types=0 if types in (None, 0) else config.integer("type_vocab_size"),
        norm=norm,
    )
    return encoder(
        hidden,
        (layer,) * count,
        embedding,
        [Layout(modules, "encoder.layer.", ("", "deberta."))],
        head=head(architecture, config, config.activation("pooler_hidden_act", "gelu")),
        max_length=longest,
        made=_made(config, attention, hidden, count, first=first),
        skips={} if first else _convolution(config),
    )


def _convolution(config: ConfigReader) -> Mapping[int, SkipSpec]:
    if config.raw("conv_kernel_size") in (None, 0):
        return {}
    size = config.integer("conv_kernel_size")
    if size % 2 == 0 or size > _WIDEST:
        raise config.error("conv_kernel_size", f"an odd number of at most {_WIDEST}")
    config.refuse("conv_groups", 1)
    is_tanh = config.raw("conv_act") in (None, "tanh")
    return {
        0: SkipSpec(layer_norm(config, eps=1e-7), size, "tanh" if is_tanh else config.activation("conv_act", "gelu"))
    }


def _tables(config: ConfigReader) -> tuple[str, ...]:
    """Of the terms beside that of two contents: their tables."""
    types = config.raw("pos_att_type") or []
    names = [name.strip() for name in types.lower().split("|")] if isinstance(types, str) else types
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) and name in _TERMS for name in names)
        or (len(set(names)) < len(names))
    ):
        raise config.error("pos_att_type", "a list of " + " and ".join(_TERMS))
    return tuple(_TERMS[name] for name in names)


def _positions(
    config: ConfigReader, tables: tuple[str, ...], longest: int, *, has_buckets: bool
) -> DisentangledSpec | None:
    if not config.flag("relative_attention", False) or not tables:
        return None
    span = _above_zero(config, "max_relative_positions") or longest
    buckets = _above_zero(config, "position_buckets") if has_buckets else None
    if max(span, buckets or 0) > _LONGEST:
        raise config.error("max_relative_positions", f"at most {_LONGEST}, as position_buckets")
    rows = rows_of_distances(span, buckets)
    return DisentangledSpec(2 * (buckets or span), rows, "pos_k" in tables, "pos_q" in tables)


def _above_zero(config: ConfigReader, name: str) -> int | None:
    """None where the field is absent, or -1."""
    return None if config.raw(name) in (None, -1, 0) else config.integer(name)


def rows_of_distances(span: int, buckets: int | None) -> tuple[int, ...]:
    """The row of the table for each difference of a key's and its query's position from -span to span.

    Rows go from the farthest key behind the query to the farthest before it. With `buckets` for each direction, half of
    them are for a distance each, and the others for distances that grow by the same factor, in float32 as in DeBERTa's
    own code.
    """
    before = np.arange(span, -span - 1, -1)  # query - key
    count = buckets or span
    if buckets is not None and buckets > 1 and span > buckets // 2 + 1:
        near = buckets // 2
        away = np.maximum(np.abs(before), near).astype(np.float32)
        steps = np.log(away / np.float32(near)) / np.log(np.float32((span - 1) / near)) * np.float32(near - 1)
        far = (np.ceil(steps) + near).astype(np.int64) * np.sign(before)
        before = np.where(np.abs(before) <= near, before, far)
    return tuple(np.clip(before + count, 0, 2 * count - 1).tolist())


def _fused(attention: AttentionSpec) -> Modules:
    """Where version 1 has q, k and v: head by head in one matrix, and without a bias of k."""
    size = attention.head_dim
    inner = "attention.self."
    matrices = {
        f"{name}.weight": TensorRef(f"{inner}in_proj.weight", each=(3 * size, i * size, (i + 1) * size))
        for i, name in enumerate(("q", "k", "v"))
    }
    return {
        **matrices,
        "q.bias": f"{inner}q_bias",
        "v.bias": f"{inner}v_bias",
        "pos_k.projection": f"{inner}pos_proj",
        "pos_q.projection": f"{inner}pos_q_proj",
    }


def _made(
    config: ConfigReader, attention: AttentionSpec, hidden: int, count: int, *, first: bool
) -> Mapping[str, Made]:
    made: dict[str, Made] = {}
    normed = "layer_norm" in str(config.raw("norm_rel_ebd") or "none").lower() and not first
    norm = layer_norm(config, eps=1e-7) if normed else None
    positions = attention.disentangled
    for layer in (f"layers.{index}" for index in range(count)):
        if first:
            made[f"{layer}.k.bias"] = Zeros(attention.kv_size)
        if positions is None:
            continue
        for name in positions.tables:
            projection, bias = f"{layer}.{name}.projection", not first or name == "pos_q"
            table = PositionTable(positions.num_rows, hidden, attention.num_heads, projection, bias, norm)
            made[f"{layer}.{name}.weight"] = table
    return made
