"""Residual blocks. A layer is a tuple of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

from ...declaring.record import record
from .norm import NormSpec
from .shapes import Shapes, under


class MixerSpec(Protocol):
    """The function that a residual block computes: attention, a recurrence, an MLP, or several mixers side by side.

    A kind of mixer has one file here and one for each device. The names of its residual block's norms begin with its
    `kind`. No two kinds have weights of the same name.
    """

    kind: ClassVar[str]

    @property
    def activations(self) -> int:
        """How many values a token takes within the mixer, for an estimate of memory."""
        ...

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights, by their names within a layer."""
        ...


@record(frozen=True, slots=True)
class ResidualBlockSpec:
    """`x = sum_norm(sum_factor * (x + scale * post_norm(mixer(norm(x)))))`, where a norm that is None changes nothing.

    With a `sum_scale`, x is multiplied in the end by a number from the checkpoint.
    """

    mixer: MixerSpec
    norm: NormSpec | None = None
    post_norm: NormSpec | None = None
    scale: float = 1.0
    sum_norm: NormSpec | None = None
    sum_scale: bool = False
    sum_factor: float = 1.0

    def norms(self) -> Iterator[tuple[str, NormSpec]]:
        """The norms of this residual block, by their names within a layer."""
        for place, norm in (("norm", self.norm), ("post_norm", self.post_norm), ("sum_norm", self.sum_norm)):
            if norm:
                yield f"{self.mixer.kind}_{place}", norm

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights of mixer and norms, by their names within a layer."""
        shapes: Shapes = {}
        for name, norm in self.norms():
            shapes |= under(name, norm.shapes(hidden_size))
        if self.sum_scale:
            shapes[f"{self.mixer.kind}_sum_scale"] = (1,)
        return shapes | self.mixer.shapes(hidden_size)


@record(frozen=True, slots=True)
class ParallelSpec:
    """Residual blocks with the same input: the sum of their `scale * post_norm(mixer(norm(x)))`.

    None has a `sum_norm`, a `sum_scale` or a `sum_factor`.
    """

    kind: ClassVar[str] = "parallel"

    residuals: tuple[ResidualBlockSpec, ...]

    def __post_init__(self) -> None:
        if any(residual.sum_norm or residual.sum_scale or residual.sum_factor != 1 for residual in self.residuals):
            raise ValueError("a residual block beside others has no sum to normalize or to scale")

    @property
    def activations(self) -> int:
        """The activations of all residual blocks."""
        return sum(residual.mixer.activations for residual in self.residuals)

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights of all residual blocks."""
        return {name: shape for residual in self.residuals for name, shape in residual.shapes(hidden_size).items()}


LayerSpec = tuple[ResidualBlockSpec, ...]
