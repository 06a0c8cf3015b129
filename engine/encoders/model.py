"""EncoderModel: how an encoder computes, as plain data. One file in `families` for each family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..models.spec import Activation, NormSpec, TowerSpec
from ..models.tensor_ref import TensorRef


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """What classifies a text: `out(norm(act(dense(x))))`, where x is the first or last token's row, or the mean of all.

    `dense` and `out` are the tower's projections `head.dense` and `head.out`, `norm` its tables `head.norm`. Without
    an activation there is no `dense`. The last token is the last one that is not `padding_id`.
    """

    num_labels: int
    activation: Activation | Literal["tanh"] | None
    pooling: Literal["cls", "mean", "last"] = "cls"
    norm: NormSpec | None = None
    padding_id: int | None = None


class AnswerTokens(NamedTuple):
    """A reranker that answers with a token: its score is the logit of `true`, less that of `false` if there is one."""

    true: int
    false: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderModel:
    """An encoder: rows of tokens, the tower's layers, the norm behind them and, if it classifies, a head.

    The tower has the weights of `embedding.norm` and `final_norm` as the tables `embedding_norm` and `final_norm`.
    `tensors` has the keys of `tower_shapes(tower)` and of `embedding.tables`, each with the places where it may lie:
    the first that is there counts. A text has at most `max_length` tokens; None: the config does not bound it. Where
    no modules.json says what a text's vector is, it is the mean of its tokens' vectors, or what `pooling` says of them,
    normalized.
    """

    tower: TowerSpec
    embedding: EmbeddingSpec
    tensors: Mapping[str, tuple[TensorRef, ...]]
    max_length: int | None = None
    final_norm: NormSpec | None = None
    head: HeadSpec | None = None
    pooling: Literal["cls", "mean", "lasttoken"] | None = None
