"""Decoders as encoders: their layers are a tower's, and a text's last token has seen all of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Literal, NamedTuple

from ...errors import ModelError
from ...models import ModelDescription
from ...models.config import ConfigReader
from ...models.families import FAMILIES as DECODERS
from ...models.families import family_of
from ...models.module_tensors import module_tensors, norm_tables
from ...models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    MlpSpec,
    ParallelSpec,
    ResidualBlockSpec,
    TowerSpec,
    mixers,
    tower_shapes,
)
from ...models.tensor_ref import TensorRef
from ..model import AnswerTokens, EmbeddingSpec, EncoderModel, HeadSpec
from .parts import head_projections, num_labels

Use = Literal["generates", "bare", "classifies", "classifies tokens"]
_GENERATES = ("ForCausalLM", "LMHeadModel")
# What the names of a family's other architectures end in. The first that fits counts.
_USES: Mapping[str, Use] = {
    **dict.fromkeys(_GENERATES, "generates"),
    "ForSequenceClassification": "classifies",
    "ForTokenClassification": "classifies tokens",
    "Model": "bare",
}
_BIDIRECTIONAL = "Bidirectional"
_POOLING: Mapping[str, Literal["cls", "mean", "last"]] = {"avg": "mean", "cls": "cls", "last": "last"}
# Whose bare decoder or classifier has a name of its own.
_TEXT_MODELS = {"Gemma3Text": "Gemma3"}


class _Reward(NamedTuple):
    num_labels: int
    modules: Mapping[str, str]


_TWO_LAYERS = {"head.dense": "score.0", "head.out": "score.2"}
REWARDS: Mapping[str, _Reward] = {
    "InternLM2ForRewardModel": _Reward(1, {"head.out": "v_head"}),
    "Qwen2ForProcessRewardModel": _Reward(2, _TWO_LAYERS),
    "Qwen2ForRewardModel": _Reward(1, _TWO_LAYERS),
}
"""The heads of reward models, which score each token, and how many labels they have, whatever their configs say."""


class _Decoder(NamedTuple):
    architecture: str  # that generates text
    use: Use
    two_way: bool


@lru_cache
def decoder_of(architecture: str) -> _Decoder | None:
    """The decoder in an architecture: one that generates text, is bare, or classifies. None: there is none here."""
    if architecture in REWARDS:
        return _Decoder(f"{architecture.partition('For')[0]}ForCausalLM", "classifies tokens", False)
    for ending, use in _USES.items():
        if not architecture.endswith(ending):
            continue
        own = architecture.removesuffix(ending)
        family = own.removesuffix(_BIDIRECTIONAL)
        family = _TEXT_MODELS.get(family, family)
        found = next((family + head for head in _GENERATES if family + head in DECODERS), None)
        return None if found is None else _Decoder(found, use, own.endswith(_BIDIRECTIONAL))
    return None


def model(architecture: str, config: ConfigReader, answer: AnswerTokens | None = None) -> EncoderModel:
    """A decoder without its head, with the head of a classifier, or with the rows of its own head for `answer`.

    Attention is causal unless the architecture or `is_causal` says otherwise. Raises ModelError, naming it, for what
    only decoders with a KV cache compute here.
    """
    decoder = decoder_of(architecture)
    assert decoder is not None
    config.refuse("quantization_config")
    config.refuse("use_bidirectional_attention", False)
    two_way = decoder.two_way or not config.flag("is_causal", True)
    pooling = _pooling(config) if decoder.two_way else "last"
    own = config.with_fields(architectures=[decoder.architecture], is_causal=None)
    described = family_of(decoder.architecture).describe(decoder.architecture, own, None)
    spec = described.spec
    _refuse(architecture, spec)
    head = (
        _head(architecture, decoder.use, config, pooling)
        if answer is None
        else HeadSpec(1, None, "last", out_bias=False)
    )
    norms = {"embedding_norm": spec.embedding.norm, "final_norm": spec.final_norm}
    tower = TowerSpec(
        spec.hidden_size,
        tuple(tuple(_seeing(residual, two_way) for residual in layer) for layer in spec.layers),
        () if head is None else head_projections(head, spec.hidden_size, bias=True),
        tuple(table for name, norm in norms.items() if norm for table in norm_tables(name, norm, spec.hidden_size)),
    )
    count, offset = spec.embedding.num_positions, spec.embedding.position_offset
    embedding = EmbeddingSpec(
        spec.vocab_size,
        num_positions=count + offset if count else 0,
        first_position=offset,
        scale=spec.embedding.scale,
        norm=spec.embedding.norm,
    )
    tensors = _tensors(described, [*tower_shapes(tower), *embedding.tables])
    if answer is not None:
        tensors["head.out.weight"] = _rows_of_head(described, answer)
    elif head is not None:
        modules = REWARDS[architecture].modules if architecture in REWARDS else {"head.out": "score"}
        heads = [name for name in tower_shapes(tower) if name.startswith("head.")]
        tensors |= {name: (ref,) for name, ref in module_tensors(heads, modules).items()}
    return EncoderModel(
        tower=tower,
        embedding=embedding,
        tensors=tensors,
        final_norm=spec.final_norm,
        max_length=spec.max_positions,
        head=head,
        pooling="lasttoken" if pooling == "last" else pooling,
    )


def _head(
    architecture: str, use: Use, config: ConfigReader, pooling: Literal["cls", "mean", "last"]
) -> HeadSpec | None:
    """The head of an architecture that classifies texts or tokens; None for any other."""
    if (reward := REWARDS.get(architecture)) is not None:
        has_dense = "head.dense" in reward.modules
        return HeadSpec(reward.num_labels, "relu" if has_dense else None, of="tokens", out_bias=has_dense)
    if use == "classifies tokens":
        return HeadSpec(num_labels(config), None, of="tokens")
    if use != "classifies":
        return None
    padding = config.raw("pad_token_id")
    padding_id = padding if isinstance(padding, int) else None
    return HeadSpec(num_labels(config), None, pooling, padding_id=padding_id, out_bias=False)


def _pooling(config: ConfigReader) -> Literal["cls", "mean", "last"]:
    """What NVIDIA's models say of themselves."""
    config.refuse("temperature", 1)
    name = config.raw("pooling")
    name = "avg" if name is None else name
    if not isinstance(name, str) or name not in _POOLING:
        raise config.error("pooling", "one of " + ", ".join(_POOLING))
    return _POOLING[name]


def _rows_of_head(described: ModelDescription, answer: AnswerTokens) -> tuple[TensorRef, ...]:
    """Where the head may lie, and the row of it, or the difference of two, that gives the score."""
    spec = described.spec
    if spec.head.bias or spec.head.softcap is not None or spec.head.divisor != 1:
        raise ModelError("config.json: a reranker's head must have neither a bias, nor a cap, nor a divisor")
    for token in answer:
        if token is not None and not 0 <= token < spec.vocab_size:
            raise ModelError(f"a reranker's answer has token {token}, but the vocabulary has {spec.vocab_size}")
    whole = described.tensors["embed.weight" if spec.head.tied else "head.weight"]
    places = [TensorRef(described.head_name), *_places(described, whole)] if spec.head.tied else [whole]
    rows = [None if token is None else (token, token + 1) for token in answer]
    return tuple(replace(place, rows=rows[0], minus_rows=rows[1]) for place in places)


def _tensors(described: ModelDescription, names: Iterable[str]) -> dict[str, tuple[TensorRef, ...]]:
    """Where the weights may lie that a tower calls otherwise than a decoder."""
    decoders = {"words": "embed.weight", "positions": "embed.positions"}
    tensors = {}
    for name in names:
        own = decoders.get(name) or name.replace("embedding_norm.", "embed.norm.")
        if own in described.tensors:
            tensors[name] = (*_places(described, described.tensors[own]), *described.otherwise(own))
    if described.spec.head.tied:
        tensors["words"] += (TensorRef(described.head_name),)
    return tensors


def _refuse(architecture: str, spec: DecoderSpec) -> None:
    """Raises ModelError if something in it is not computed by towers."""
    lacks = None
    if spec.streams is not None or spec.embedding.per_layer is not None:
        lacks = "an input for each of its layers"
    elif spec.embedding.size != spec.hidden_size:
        lacks = "embeddings that are narrower than its layers"
    for mixer in chain.from_iterable(map(mixers, spec.layers)):
        if not isinstance(mixer, AttentionSpec | MlpSpec | ExpertsSpec):
            lacks = lacks or f"layers of the kind {mixer.kind}"
        elif isinstance(mixer, AttentionSpec) and (mixer.kv_layer is not None or mixer.output_gate or mixer.sinks):
            lacks = lacks or "attention with an output gate, with sinks, or with another layer's K and V"
    if lacks:
        raise ModelError(f"{architecture} cannot embed or classify here, because it has {lacks}")


def _seeing(residual: ResidualBlockSpec, two_way: bool) -> ResidualBlockSpec:
    """The residual block with attention in both directions, or causal attention."""
    mixer = residual.mixer
    if isinstance(mixer, ParallelSpec):
        mixer = ParallelSpec(tuple(_seeing(part, two_way) for part in mixer.residuals))
    elif isinstance(mixer, AttentionSpec):
        mixer = replace(mixer, two_way=two_way)
    return replace(residual, mixer=mixer)


def _places(described: ModelDescription, ref: TensorRef) -> tuple[TensorRef, ...]:
    """Where a weight may lie: in a whole model, or in a bare decoder."""
    return ref, _without(ref, described.base_prefix)


def _without(ref: TensorRef, prefix: str) -> TensorRef:
    stack = tuple(_without(other, prefix) for other in ref.stack)
    return replace(ref, name=ref.name.removeprefix(prefix), stack=stack)
