"""StageWeights: the weights of some layers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...weights.dtypes import DType
from ...weights.quantization import TensorFormat
from ...weights.tensor import WeightSource, WeightTensor


class StageWeights:
    """A WeightSource that has the tensors called `names` of another, and reads no others."""

    def __init__(self, weights: WeightSource, names: Sequence[str]) -> None:
        self._weights, self._names = weights, frozenset(names)
        self.dtype: DType = weights.dtype
        self.identity = weights.identity

    def __getitem__(self, name: str) -> WeightTensor:
        if name not in self._names:
            raise KeyError(name)
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._weights if name in self._names)

    def stored_format(self, name: str) -> TensorFormat | None:
        """As the source has it; also of tensors of other stages, whose formats are decided together."""
        return self._weights.stored_format(name)
