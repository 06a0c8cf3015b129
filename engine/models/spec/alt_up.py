"""AltUp: a residual stream several times as wide as what layers compute with (https://arxiv.org/abs/2301.13310)."""

from __future__ import annotations

from typing import ClassVar

from ...declaring.record import record
from .norm import NormSpec
from .residual_block import ResidualBlockSpec
from .shapes import Shapes, linear, under


@record(frozen=True, slots=True)
class StreamsSpec:
    """A token has `count` rows, one behind the other, instead of one row x of `hidden` values.

    The first is its embedding x. Row i is `W_i x`, scaled to the size of x. In the end, each row i except the first
    becomes `V_i row_i`, scaled to the size of the first; their mean goes on. The size of a row is the root of its mean
    square. A row that is scaled counts as at least the root of `min_square`.
    """

    count: int
    min_square: float

    def __post_init__(self) -> None:
        if self.count < 2 or self.min_square <= 0:
            raise ValueError("there must be two streams or more, whose least square is above 0")

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights: W_i as `embed.stream.i` and V_i as `final.stream.i`."""
        shapes: Shapes = {}
        for end in ("embed", "final"):
            for i in range(1, self.count):
                shapes |= under(f"{end}.stream.{i}", linear(hidden_size, hidden_size, bias=False))
        return shapes


@record(frozen=True, slots=True)
class AltUpSpec:
    """A layer that computes with one of its `streams`, and corrects the others by the result.

    `m(x) = tanh(router(norm(x)) / hidden)` is a number for each stream. First the rows are predicted: all rows i are
    added to row j, each times number `j * streams + i` of `predict m(active row)`. The `residuals` compute b from the
    predicted `active` row a. Then `(b - a) (1 + correct m(b))` is added to the predicted rows, with a factor for each.
    The residual block `passive` computes with the active row, multiplied by a vector before if it is `scaled`. Its
    result is added to all rows except the first.

    Raises ValueError for a stream that does not exist.
    """

    kind: ClassVar[str] = "alt_up"

    streams: int
    active: int
    norm: NormSpec
    residuals: tuple[ResidualBlockSpec, ...]
    passive: ResidualBlockSpec
    scaled: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.active < self.streams:
            raise ValueError(f"of {self.streams} streams, {self.active} cannot be the active one")

    @property
    def activations(self) -> int:
        """A number for each stream; what the residual blocks take is their own."""
        return self.streams

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights:

        router, norm, `predict` and `correct` row by row, the vector, and those of all residual blocks.
        """
        count = self.streams
        shapes = under("alt_up.router", linear(count, hidden_size, bias=False))
        shapes |= under("alt_up.norm", self.norm.shapes(hidden_size))
        shapes |= {"alt_up.predict": (count**3,), "alt_up.correct": (count**2,)}
        if self.scaled:
            shapes["alt_up.scale"] = (hidden_size,)
        for residual in (*self.residuals, self.passive):
            shapes |= residual.shapes(hidden_size)
        return shapes
