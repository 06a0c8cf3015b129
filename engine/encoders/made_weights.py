"""Weights that are made of a checkpoint's tensors as they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..declaring.record import record
from ..media.processing import normalized
from ..models.spec import NormSpec, TowerSpec, tower_shapes
from ..models.spec.shapes import Shapes, linear, under
from ..models.tensor_ref import TensorRef
from ..weights.quantization import TensorFormat
from ..weights.stored import Stored
from ..weights.tensor import DenseTensor, WeightTensor, to_float32
from ..weights.tower import TowerWeights

Floats = NDArray[np.float32]


class Made(Protocol):
    """How a weight is made, in float32."""

    def sources(self) -> Shapes:
        """The tensors that it is made of, by the model's own names."""
        ...

    def make(self, read: Callable[[str], Floats]) -> Floats:
        """The weight, of the sources that `read` gives."""
        ...


@record(frozen=True, slots=True)
class Zeros:
    """The bias of a matrix that has none, beside others that do."""

    size: int

    def sources(self) -> Shapes:
        """See Made."""
        return {}

    def make(self, read: Callable[[str], Floats]) -> Floats:
        """See Made."""
        return np.zeros(self.size, np.float32)


@record(frozen=True, slots=True)
class PositionTable:
    """A table of disentangled attention: for each head, its part of the table `relative`, normalized, through the
    matrix `projection`, `[heads * rows, size / heads]`.
    """

    num_rows: int
    size: int
    num_heads: int
    projection: str
    bias: bool
    norm: NormSpec | None = None

    def sources(self) -> Shapes:
        """See Made."""
        norm = {} if self.norm is None else under("relative_norm", self.norm.shapes(self.size))
        projection = under(self.projection, linear(self.size, self.size, self.bias))
        return {"relative.weight": (self.num_rows, self.size)} | norm | projection

    def make(self, read: Callable[[str], Floats]) -> Floats:
        """See Made."""
        rows = read("relative.weight")
        if self.norm is not None:
            rows = normalized(rows, self.norm.eps, read("relative_norm.weight"), read("relative_norm.bias"))
        rows = rows @ read(f"{self.projection}.weight").T
        if self.bias:
            rows += read(f"{self.projection}.bias")
        by_head = rows.reshape(self.num_rows, self.num_heads, -1).transpose(1, 0, 2)
        return np.ascontiguousarray(by_head.reshape(self.num_heads * self.num_rows, -1))


def stored_shapes(spec: TowerSpec, made: Mapping[str, Made]) -> Shapes:
    """What a checkpoint has to have for a tower of which some weights are `made`."""
    shapes = {name: shape for name, shape in tower_shapes(spec).items() if name not in made}
    for one in made.values():
        shapes |= one.sources()
    return shapes


class MadeWeights:
    """A tower's weights, of which some are `made`. See TowerWeights."""

    identity: str | None = None  # a cache would have to know how each was made

    def __init__(
        self,
        checkpoint: Stored,
        spec: TowerSpec,
        tensors: Mapping[str, Sequence[TensorRef]],
        made: Mapping[str, Made],
    ) -> None:
        self._names, self._made = tuple(tower_shapes(spec)), made
        stored = tuple(stored_shapes(spec, made).items())
        self._stored = TowerWeights(checkpoint, TowerSpec(spec.hidden_size, (), tables=stored), tensors)
        self.dtype, self.stored_names = self._stored.dtype, self._stored.stored_names

    def __getitem__(self, name: str) -> WeightTensor:
        if name not in self._made:
            return self._stored[name]
        made = self._made[name]
        origins = ", ".join(str(self._stored[source].origin) for source in made.sources())
        return DenseTensor(made.make(self._read), "float32", origin=origins or None)

    def stored_format(self, name: str) -> TensorFormat | None:
        """See WeightSource. What is made is in floats."""
        return None if name in self._made else self._stored.stored_format(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def _read(self, name: str) -> Floats:
        return to_float32(self._stored[name])
