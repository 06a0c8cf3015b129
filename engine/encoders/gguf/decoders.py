"""Decoders in GGUF files as encoders, such as Qwen3-Embedding and Qwen3-Reranker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import ModelError
from ...models.overrides import overridden
from ...models.spec import ProjectionSpec, tower_shapes
from ...models.tensor_ref import TensorRef
from ...weights.gguf.architectures import architecture_of, config_of
from ...weights.gguf.fields import Fields
from ...weights.gguf.reader import GgufFile
from ..families import encoder_model
from ..model import EncoderModel, HeadSpec
from .norms import with_whole_norms

_TEMPLATE = "tokenizer.chat_template.rerank"
_QUERY, _DOCUMENT = "{query}", "{document}"
_ANSWERS = ["yes", "no"]
_HEAD = "cls.output.weight"


def decoder_in(file: GgufFile, fields: Fields, overrides: Mapping[str, Any] | None) -> EncoderModel:
    """The decoder of a file without its head, with its tensors where the file has them. `fields` are those of its
    architecture. Raises ModelError, naming the file, for one that cannot embed.
    """
    architecture = architecture_of(file)
    config = {**config_of(file), "is_causal": fields.flag("attention.causal", True)}
    try:
        model = encoder_model(overridden(config, overrides, None, None), converts=True)
    except ModelError as error:
        raise ModelError(f"{file.path}, whose metadata was read as a config.json: {error}") from error
    if model is None:
        raise ModelError(f"{file.path}: models of this architecture cannot embed")
    shapes = tower_shapes(model.tower) | {
        name: (count, model.tower.hidden_size) for name, count in model.embedding.tables.items()
    }
    tensors: dict[str, tuple[TensorRef, ...]] = {}
    for name in shapes:
        ref = model.tensors[name][0]
        found = architecture.reference(name, ref, shapes, file.tensors.keys())
        if found is None:
            raise ModelError(f"{file.path} has no tensor for {ref.name}, which the model needs")
        order = architecture.row_order(name, config)
        tensors[name] = (replace(found, permute=order) if order else found,)
    model = replace(model, tensors=tensors)
    return with_whole_norms(model) if architecture.norms_plus_one else model


def as_reranker(fields: Fields, model: EncoderModel) -> EncoderModel:
    """The same with a head that gives by how much its answer to a pair is rather yes than no, as Qwen3-Reranker's.

    Raises ModelError for other classifiers.
    """
    if fields.raw("classifier.output_labels") is None or fields.texts("classifier.output_labels") != _ANSWERS:
        raise fields.error("classifier.output_labels", "yes and no in a reranker that is made of a chat model")
    head = ("head.out", ProjectionSpec(model.tower.hidden_size, 1))
    place = TensorRef(_HEAD, rows=(0, 1), minus_rows=(1, 2))
    return replace(
        model,
        tower=replace(model.tower, projections=(head,)),
        tensors={**model.tensors, "head.out.weight": (place,)},
        head=HeadSpec(1, None, "last"),
    )


def pair_texts_in(file: GgufFile) -> tuple[str, str, str]:
    """What a reranker's template has before a query, between it and a document, and behind that. Raises ModelError."""
    template = Fields(file).text(_TEMPLATE)
    before, query, rest = template.partition(_QUERY)
    between, document, after = rest.partition(_DOCUMENT)
    if not (query and document):
        raise ModelError(f"{file.path}: {_TEMPLATE} must have {_QUERY}, and {_DOCUMENT} behind it")
    return before, between, after
