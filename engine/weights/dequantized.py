"""Weights without the formats that a checkpoint stores them in: what the model itself is, for a reference."""

from __future__ import annotations

from collections.abc import Iterator

from .dtypes import DType
from .quantization import TensorFormat
from .tensor import DenseTensor, WeightSource, WeightTensor


class DequantizedWeights:
    """A WeightSource that gives the quantized tensors of another one as float32, and all others as they are."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights
        self.dtype: DType = "float32"
        self.identity = weights.identity

    def __getitem__(self, name: str) -> WeightTensor:
        tensor = self._weights[name]
        if isinstance(tensor, DenseTensor):
            return tensor
        return DenseTensor(tensor.dequantize(), "float32", origin=tensor.origin)

    def stored_format(self, name: str) -> TensorFormat | None:
        """None: all are floats."""
        return None

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)
