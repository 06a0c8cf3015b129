"""Parts of encoders that several families share: layers, heads, and the places of their weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

from ...declaring.record import record
from ...errors import ModelError
from ...models.config import ConfigReader
from ...models.families.parts import attention
from ...models.module_tensors import in_places, module_tensors, norm_tables
from ...models.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    ProjectionSpec,
    ResidualBlockSpec,
    TowerSpec,
)
from ...models.tensor_ref import TensorRef
from ..made_weights import Made, stored_shapes
from ..model import EmbeddingSpec, EncoderModel, HeadSpec, SkipSpec

Modules = Mapping[str, str | TensorRef]
_TABLES = {"words": "word_embeddings", "positions": "position_embeddings", "types": "token_type_embeddings"}
# Where BERT has its weights.
EMBEDDINGS: Modules = {name: f"embeddings.{module}.weight" for name, module in _TABLES.items()} | {
    "embedding_norm": "embeddings.LayerNorm"
}
BERT_LAYER: Modules = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "attention_sum_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_sum_norm": "output.LayerNorm",
}
# Where transformers has those of a layer with rope and a gated MLP.
GATED_LAYER: Modules = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "attention_sum_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "mlp_sum_norm": "post_mlp_layernorm",
}
# RoBERTa's heads, which MPNet has too. `head.bias` is where the bias of `out` lies if it is not beside its matrix.
CLASSIFIER: Modules = {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"}
TOKEN_CLASSIFIER: Modules = {"head.out": "classifier"}
WORDS_HEAD: Modules = {
    "head.dense": "lm_head.dense",
    "head.norm": "lm_head.layer_norm",
    "head.out": "lm_head.decoder",
    "head.bias": "lm_head.bias",
}
_OF_TOKENS, _OF_WORDS = "ForTokenClassification", "ForMaskedLM"
_OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def two_way(config: ConfigReader, *, bias: bool) -> AttentionSpec:
    """Attention to all tokens of a text, without positions. All of its matrices have a `bias`, or none."""
    return replace(attention(config, qkv_bias=bias, out_bias=bias), two_way=True)


def layer_norm(config: ConfigReader, name: str = "layer_norm_eps", eps: float = 1e-12) -> NormSpec:
    """LayerNorm with a bias."""
    return NormSpec("layer", config.number(name, eps), bias=True)


def plain_mlp(config: ConfigReader) -> MlpSpec:
    """BERT's."""
    return MlpSpec(config.integer("intermediate_size"), config.activation("hidden_act", "gelu"), gated=False, bias=True)


def post_norm_layer(attention: AttentionSpec, mlp: MlpSpec, norm: NormSpec) -> LayerSpec:
    """A layer that normalizes the sums, as BERT's do."""
    return ResidualBlockSpec(attention, sum_norm=norm), ResidualBlockSpec(mlp, sum_norm=norm)


def num_labels(config: ConfigReader) -> int:
    """How many labels a classifier has."""
    labels = config.raw("id2label")
    return len(labels) if isinstance(labels, dict) and labels else config.integer("num_labels", 2)


def head(
    architecture: str,
    config: ConfigReader,
    activation: Activation | Literal["tanh"],
    pooling: Literal["cls", "mean"] = "cls",
    norm: NormSpec | None = None,
    *,
    words: tuple[Activation, NormSpec] | None = None,
    same: bool = False,
) -> HeadSpec | None:
    """The head of an architecture that classifies texts or tokens, or predicts words; None for any other.

    The activation and what follows are those of texts. That of `words` has its own activation and norm. That of tokens
    is a linear layer alone, unless it has the `same` parts.
    """
    if architecture.endswith(_OF_TOKENS):
        return HeadSpec(num_labels(config), activation if same else None, norm=norm if same else None, of="tokens")
    if architecture.endswith(_OF_WORDS) and words is not None:
        return HeadSpec(config.integer("vocab_size"), words[0], "max", words[1], of="words")
    if not architecture.endswith("ForSequenceClassification"):
        return None
    return HeadSpec(num_labels(config), activation, pooling, norm)


def head_modules(architecture: str, texts: Modules, tokens: Modules, words: Modules) -> Modules:
    """The modules of the architecture's head: the one for texts, tokens or words."""
    if architecture.endswith(_OF_TOKENS):
        return tokens
    return words if architecture.endswith(_OF_WORDS) else texts


@record(frozen=True, slots=True)
class Layout:
    """Where a checkpoint has the weights: `modules` by their names here, those of a layer behind `layers` and its
    number, and any of the `prefixes` before all of that. A layer of the checkpoint is `in_parts` layers of the tower.
    """

    modules: Modules
    layers: str
    prefixes: tuple[str, ...] = ("",)
    in_parts: int = 1

    def places(self, names: Iterable[str]) -> dict[str, tuple[TensorRef, ...]]:
        """Each weight's places, also under the names that TensorFlow gave norms."""
        whole = {name: self._of_whole_layer(name) for name in names}
        places = in_places(module_tensors(whole.values(), self.modules, self.layers), self.prefixes)
        return {name: (*places[own], *chain.from_iterable(map(_old_named, places[own]))) for name, own in whole.items()}

    def _of_whole_layer(self, name: str) -> str:
        if self.in_parts == 1 or not name.startswith("layers."):
            return name
        layers, number, rest = name.split(".", 2)
        return f"{layers}.{int(number) // self.in_parts}.{rest}"


def encoder(
    hidden_size: int,
    layers: Sequence[LayerSpec],
    embedding: EmbeddingSpec,
    layouts: Sequence[Layout],
    *,
    head: HeadSpec | None = None,
    head_bias: bool = True,
    final_norm: NormSpec | None = None,
    max_length: int | None = None,
    made: Mapping[str, Made] | None = None,
    skips: Mapping[int, SkipSpec] | None = None,
) -> EncoderModel:
    """An encoder whose weights lie in one of the layouts, or are made. Learned positions bound its length, too."""
    if head is not None and head.of == "words":
        layouts = [*chain.from_iterable(_with_words(layout, head) for layout in layouts)]
    skips = skips or {}
    norms = {"embedding_norm": embedding.norm, "final_norm": final_norm, "head.norm": head and head.norm}
    norms |= {f"skips.{index}": skip.norm for index, skip in skips.items()}
    tower = TowerSpec(
        hidden_size,
        tuple(layers),
        (*(() if head is None else head_projections(head, hidden_size, head_bias)), *_convolutions(skips, hidden_size)),
        tuple(chain.from_iterable(norm_tables(name, norm, hidden_size) for name, norm in norms.items() if norm)),
    )
    if 0 < embedding.num_positions <= embedding.first_position:
        raise ModelError("config.json: max_position_embeddings must be larger than the first position")
    made = made or {}
    names = [*stored_shapes(tower, made), *embedding.tables]
    places = [layout.places(names) for layout in layouts]
    lengths = [max_length, embedding.num_positions - embedding.first_position if embedding.num_positions else None]
    return EncoderModel(
        tower=tower,
        embedding=embedding,
        tensors={name: tuple(chain.from_iterable(one[name] for one in places)) for name in names},
        max_length=min((length for length in lengths if length is not None), default=None),
        final_norm=final_norm,
        head=head,
        made=made,
        skips=skips,
    )


def _convolutions(skips: Mapping[int, SkipSpec], size: int) -> Iterator[tuple[str, ProjectionSpec]]:
    for index, skip in skips.items():
        if skip.kernel_size is not None:
            activation = None if skip.activation == "tanh" else skip.activation
            inputs = skip.kernel_size * size
            yield f"skips.{index}.conv", ProjectionSpec(inputs, size, bias=True, activation=activation)


def head_projections(head: HeadSpec, size: int, bias: bool) -> tuple[tuple[str, ProjectionSpec], ...]:
    """The tower's projections that are a head's, of rows of `size`. Its dense layer may have a `bias`."""
    outs = tuple((name, ProjectionSpec(size, end - begin, bias=head.out_bias)) for name, begin, end in head.outs)
    if head.activation is None:
        return outs
    activation = None if head.activation == "tanh" else head.activation
    return ("head.dense", ProjectionSpec(size, size, bias=bias, activation=activation)), *outs


def _with_words(layout: Layout, head: HeadSpec) -> Iterator[Layout]:
    """The layout with the matrix of words beside its bias, and with that of the embeddings, to which it is tied."""
    modules = layout.modules
    for weight, bias in (
        (f"{modules['head.out']}.weight", f"{modules['head.out']}.bias"),
        (modules["words"], modules.get("head.bias", f"{modules['head.out']}.bias")),
    ):
        parts = {
            f"{name}.{kind}": TensorRef(str(ref), rows=(begin, end))
            for name, begin, end in head.outs
            for kind, ref in (("weight", weight), ("bias", bias))
        }
        yield replace(layout, modules={**modules, **parts})


def _old_named(ref: TensorRef) -> Iterator[TensorRef]:
    for new, old in _OLD_NAMES.items():
        if ref.name.endswith(new):
            yield replace(ref, name=ref.name.removesuffix(new) + old)
