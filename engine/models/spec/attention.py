"""Attention, and how it knows positions."""

from __future__ import annotations

from typing import ClassVar, Literal

from ...declaring.record import record
from .norm import NormSpec
from .shapes import Shapes, linear, under

_PADDING = 16  # so that the kernels can read a vector of biases from any distance on


@record(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864).

    The first `2 * len(inv_freq)` dimensions of a head are rotated in pairs: in halves, dimension i with
    `i + len(inv_freq)`, or `interleaved`, 2i with 2i + 1. The angle of pair i at position p is `p * inv_freq[i]`, and
    cosine and sine are multiplied by `attention_factor` (YaRN, LongRoPE). Every scaling scheme arrives as this table.
    With `axes`, a token has several positions, and pair i turns by that of `axes[i]`: time, height and width, or the
    row and column of a patch. Text has the same position on all of them.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    interleaved: bool = False
    axes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.axes and (len(self.axes) != len(self.inv_freq) or not 0 <= min(self.axes) <= max(self.axes) < 3):
            raise ValueError("rope by axes needs one of three for each pair of dimensions")


@record(frozen=True, slots=True)
class TemperatureSpec:
    """Queries at position p are multiplied by `1 + beta * log(1 + floor((p + offset) / length))`, `length` in tokens.

    It keeps the softmax sharp in contexts longer than those of training (https://arxiv.org/abs/2501.19399).
    """

    beta: float
    length: int
    offset: int = 0

    def __post_init__(self) -> None:
        if self.beta <= 0 or self.length < 1 or self.offset < 0:
            raise ValueError("a temperature by position needs a beta and a length above 0")


@record(frozen=True, slots=True)
class KvShape:
    """A token's entry in the cache of one layer: K `[num_heads, key_dim]` and V `[num_heads, value_dim]`.

    It lies in the cache group of `window`. With `values_in_keys` V is a part of K, and is kept with it.
    """

    window: int | None
    num_heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False

    @property
    def values(self) -> int:
        """How many numbers these are."""
        return self.num_heads * (self.key_dim + (0 if self.values_in_keys else self.value_dim))


@record(frozen=True, slots=True)
class DisentangledSpec:
    """Scores of what tokens contain with where others are (DeBERTa, https://arxiv.org/abs/2006.03654).

    A head has two tables of `num_rows` rows, as wide as its queries and keys. The row r for a pair of tokens depends on
    the key's position minus the query's: `rows` has it for each difference from -span to span, and beyond them the last
    one counts. With `content_to_position`, `q . pos_k[r]` is added to `q . k`, and with `position_to_content`,
    `k . pos_q[r]`. Raises ValueError for numbers that do not fit together.
    """

    num_rows: int
    rows: tuple[int, ...]
    content_to_position: bool = True
    position_to_content: bool = True

    def __post_init__(self) -> None:
        if len(self.rows) % 2 == 0 or not 0 <= min(self.rows) <= max(self.rows) < self.num_rows:
            raise ValueError("positions need one of the rows for each difference of a span")
        if not self.tables:
            raise ValueError("positions are met by queries, by keys or by both")

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables of all heads."""
        named = {"pos_k": self.content_to_position, "pos_q": self.position_to_content}
        return tuple(name for name, is_there in named.items() if is_there)


def bias_distances(span: int) -> list[int]:
    """The distances of a head's biases as devices have them: from -span to span, the first and last 16 times more."""
    return [min(max(distance, -span), span) for distance in range(-span - _PADDING, span + _PADDING + 1)]


@record(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention. `num_kv_heads` divides `num_heads`; each KV head serves that many query heads in order.

    `sliding_window`: a token attends to itself and the `sliding_window - 1` tokens before it; None is no limit.
    `qk_norm` normalizes queries and keys: each `head` on its own, with the same weights for all or with those of `each`
    head, or over the `whole` width all heads of a token together. That is before rope, or `qk_norm_after_rope`. Then
    `query_temperature` scales the queries. A score is `q.k * scale`, then `softcap * tanh(score / softcap)` if
    there is a cap (https://arxiv.org/abs/2408.00118), then `score - alibi_slopes[head] * abs(key position - query
    position)` if there are slopes, one a query head (https://arxiv.org/abs/2108.12409). With a `bias_span`, which only
    towers may have, a head has a learned bias for each difference of these positions from `-bias_span` to `bias_span`.
    It is added to the score; beyond them the last one counts. `disentangled`, which only towers may have, adds to
    `q.k`. With none of these a layer knows no positions (NoPE).
    `sinks`: each query head has a learned score that belongs to no token. It is a part of the softmax and has no value
    (https://arxiv.org/abs/2508.10925). With an `output_gate`, a head's result is multiplied by `sigmoid(q_gate x)`.

    `v_norm` normalizes each value head. With `values_from_keys` values have no projection: they are the keys before
    norm and rope. With a `kv_layer` a layer has no K and V of its own: it reads those of that earlier attention layer,
    which has the same heads and window (https://arxiv.org/abs/2405.05254).

    Where attention is `two_way`, a token sees beyond itself: up to its `visible_until` of StepBatch, the end of its
    image, or that of its segment in a tower, where a `sliding_window` reaches as far ahead as back. With `clipped` the
    inputs and outputs of each matrix have bounds. Raises ValueError for numbers that do not fit together.
    """

    kind: ClassVar[str] = "attention"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "each", "whole"] = "head"
    qk_norm_after_rope: bool = False
    rope: RopeSpec | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    sinks: bool = False
    output_gate: bool = False
    query_temperature: TemperatureSpec | None = None
    v_norm: NormSpec | None = None
    values_from_keys: bool = False
    kv_layer: int | None = None
    two_way: bool = False
    clipped: bool = False
    bias_span: int | None = None
    disentangled: DisentangledSpec | None = None

    def __post_init__(self) -> None:
        if self.kv_layer is not None and (self.v_norm is not None or self.values_from_keys):
            raise ValueError("attention that reads another layer's K and V has no values of its own")
        if self.output_gate and (self.kv_layer is not None or self.values_from_keys):
            raise ValueError("an output gate goes with K and V that have projections of their own")
        if self.clipped and (self.qkv_bias or self.out_bias or self.values_from_keys or self.output_gate):
            raise ValueError("clipped attention has neither biases, nor an output gate, nor keys as values")
        if self.values_from_keys and self.qk_norm_over == "whole":
            raise ValueError("values cannot be taken from keys that are normalized over their whole width")
        if self.scale <= 0 or (self.softcap is not None and self.softcap <= 0):
            raise ValueError("the scores' scale and softcap must be above 0")
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.num_heads:
            raise ValueError(f"{self.num_heads} query heads need as many ALiBi slopes, not {len(self.alibi_slopes)}")
        if self.bias_span is not None and self.bias_span < 1:
            raise ValueError("biases by distance need a span")
        changed = self.rope or self.qk_norm or self.clipped or self.values_from_keys or self.query_temperature
        if self.disentangled and (self.num_kv_heads != self.num_heads or changed):
            raise ValueError(
                "disentangled attention has as many KV heads, and neither rope, norms, bounds nor a temperature of q "
                "and k"
            )
        if self.alibi_slopes is not None and self.rope is not None:
            raise ValueError("positions are given by rope or by ALiBi, not by both")
        if self.qk_norm_after_rope and (self.rope is None or self.qk_norm is None or self.qk_norm_over == "whole"):
            raise ValueError("only rotated heads can be normalized after rope, each on its own")

    @property
    def q_size(self) -> int:
        """The width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def activations(self) -> int:
        """How many values a token takes: queries, keys, values and gates, and the queries once more."""
        return 2 * (self.q_size + self.kv_size) + self.q_size * (self.output_gate + self.clipped)

    @property
    def cached(self) -> KvShape | None:
        """What it keeps of a token; None if that is another layer's."""
        if self.kv_layer is not None:
            return None
        return KvShape(self.sliding_window, self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def projections(self) -> dict[str, int]:
        """The matrices of its inputs: their names and how many outputs they have."""
        sizes = {"q": self.q_size}
        if self.kv_layer is None:
            sizes["k"] = self.kv_size
            if not self.values_from_keys:
                sizes["v"] = self.kv_size
        return sizes

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights: q, k, v, o and a gate, the norms of queries, keys and values, the sinks `[num_heads]`, the
        biases by distance, head by head, in one row, and disentangled attention's tables, head by head.
        """
        shapes: Shapes = {}
        for name, size in self.projections.items():
            shapes |= under(name, linear(size, hidden_size, self.qkv_bias, self.clipped))
        shapes |= under("o", linear(hidden_size, self.q_size, self.out_bias, self.clipped))
        if self.qk_norm:
            shared = self.qk_norm_over == "head"
            shapes |= under("q_norm", self.qk_norm.shapes(self.head_dim if shared else self.q_size))
            if self.kv_layer is None:
                shapes |= under("k_norm", self.qk_norm.shapes(self.head_dim if shared else self.kv_size))
        if self.v_norm:
            shapes |= under("v_norm", self.v_norm.shapes(self.head_dim))
        if self.sinks:
            shapes["sinks"] = (self.num_heads,)
        if self.bias_span is not None:
            shapes["distance_bias"] = (self.num_heads * len(bias_distances(self.bias_span)),)
        if self.disentangled is not None:
            for name in self.disentangled.tables:
                shapes |= under(name, linear(self.num_heads * self.disentangled.num_rows, self.head_dim, bias=False))
        if self.output_gate:
            shapes |= under("q_gate", linear(self.q_size, hidden_size, self.qkv_bias))
        return shapes
