"""EncoderModel: how an encoder computes, as plain data. One file in `families` for each family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..declaring.record import record
from ..models.spec import Activation, NormSpec, TowerSpec
from ..models.tensor_ref import TensorRef

if TYPE_CHECKING:
    from .made_weights import Made

_WORDS = 1024  # of a projection: the logits of all tokens of a long text for all words would take gigabytes


@record(frozen=True, slots=True)
class EmbeddingSpec:
    """A token's row: `norm(scale * words[id] + positions[position] + types[type])`.

    The tables have `num_words`, `num_positions` and `num_types` rows; 0: there is none. Positions count from
    `first_position`. With a `padding_id` tokens of that id do not count: theirs is the one before the first.
    """

    num_words: int
    num_positions: int = 0
    num_types: int = 0
    first_position: int = 0
    padding_id: int | None = None
    scale: float = 1.0
    norm: NormSpec | None = None

    @property
    def tables(self) -> dict[str, int]:
        """The tables that there are, and how many rows each has."""
        rows = {"words": self.num_words, "positions": self.num_positions, "types": self.num_types}
        return {name: count for name, count in rows.items() if count}


@record(frozen=True, slots=True)
class HeadSpec:
    """What computes logits: `out(norm(act(dense(x))))`.

    Of a `text` x is the first or last token's row, or the mean of all; the last token is the last one that is not
    `padding_id`. Of `tokens` it is each row. Of `words` too, and there are as many logits as words: `log(1 +
    relu(logit))`, `log_twice` with another log(1 + x) around it, is the weight of a word, of which the text has the
    largest over its tokens, `max`, or the `sum` (SPLADE, arXiv 2109.10086).

    `dense` is the tower's projection `head.dense`, `norm` its tables `head.norm`, and `out` is in `outs`. Without an
    activation there is no `dense`.
    """

    num_labels: int
    activation: Activation | Literal["tanh"] | None
    pooling: Literal["cls", "mean", "last", "max", "sum"] = "cls"
    norm: NormSpec | None = None
    padding_id: int | None = None
    of: Literal["text", "tokens", "words"] = "text"
    out_bias: bool = True
    log_twice: bool = False

    @property
    def fits_each_token(self) -> bool:
        """Whether it is for a text, but reads a row as any other: that of the last token, as far as it has seen."""
        return self.of == "text" and self.pooling == "last"

    @property
    def outs(self) -> Iterator[tuple[str, int, int]]:
        """The tower's projections that are `out`, by name, each with the first of its labels and their end."""
        if self.of != "words":
            yield "head.out", 0, self.num_labels
            return
        for begin in range(0, self.num_labels, _WORDS):
            yield f"head.out.{begin // _WORDS}", begin, min(begin + _WORDS, self.num_labels)


class AnswerTokens(NamedTuple):
    """A reranker that answers with a token: its score is the logit of `true`, less that of `false` if there is one."""

    true: int
    false: int | None = None


@record(frozen=True, slots=True)
class TasksSpec:
    """Tasks with low-rank adapters, which requests choose by the names of their `prompts`. Without one there are none.

    A task's adapter adds `scale * b (a x)` to products with the tower's `matrices`: those of one name follow each other
    in one b. The model's tensors have NAME.lora_a and NAME.lora_b of each name, `[tasks, rank, inputs]` and `[tasks,
    outputs, rank]`, and of each table of the embedding, `[tasks, rows, rank]` and `[tasks, rank, width]`.
    """

    prompts: Mapping[str, str]
    rank: int
    scale: float
    matrices: Mapping[str, tuple[str, ...]]


@record(frozen=True, slots=True)
class SkipSpec:
    """A connection around a layer of the tower: `norm(layer(x) + x)`, or `norm(layer(x) + act(conv(x)))`.

    With a `kernel_size`, which is odd, there is a convolution over as many tokens, of which one is in the middle, and
    what is not of the text is 0. The norm is the tower's tables `skips.LAYER`, and the convolution its projection
    `skips.LAYER.conv`, whose inputs are the first number of each token, then the second of each, and so on.
    """

    norm: NormSpec
    kernel_size: int | None = None
    activation: Activation | Literal["tanh"] | None = None


@record(frozen=True, slots=True, kw_only=True)
class EncoderModel:
    """An encoder: rows of tokens, the tower's layers, the norm behind them and, if it classifies, a head.

    The tower has the weights of `embedding.norm` and `final_norm` as the tables `embedding_norm` and `final_norm`.
    `tensors` has the keys of `tower_shapes(tower)` and of `embedding.tables`, each with the places where it may lie:
    the first that is there counts. Weights that are `made` of others have none: what those are made of has. A text has
    at most `max_length` tokens; None: the config does not bound it. Where no modules.json says what a text's vector is,
    it is the mean of its tokens' vectors, or what `pooling` says of them, normalized. `skips` go around the layers of
    these numbers.
    """

    tower: TowerSpec
    embedding: EmbeddingSpec
    tensors: Mapping[str, tuple[TensorRef, ...]]
    max_length: int | None = None
    final_norm: NormSpec | None = None
    head: HeadSpec | None = None
    pooling: Literal["cls", "mean", "lasttoken"] | None = None
    made: Mapping[str, Made] = field(default_factory=dict)
    tasks: TasksSpec | None = None
    skips: Mapping[int, SkipSpec] = field(default_factory=dict)
