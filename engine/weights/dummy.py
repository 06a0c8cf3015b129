"""Random weights of a model's shape: to measure and to test without a checkpoint."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..models import ModelDescription
from ..models.generation import GenerationConfig
from ..models.spec import DecoderSpec, TowerSpec, tensor_shapes, tower_shapes
from ..models.tensor_ref import TensorRef
from .dtypes import STORAGE, DType, bfloat16_bits, dtype_from_config
from .source import ModelSource, TowerSource, VisionSource
from .tensor import DenseTensor, WeightSource

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer

_SCALE = 0.02
# A prime, so that no two rows of a matrix of up to this many rows are the same numbers.
_PERIOD = 1_048_583


class DummyWeights:
    """Normally distributed weights with deviation 0.02; norms and scales of sums are the identity.

    They are a function of `seed` and the names.
    There is one buffer of random numbers, as long as the largest tensor needs and repeating with a period. A tensor
    is a read-only view of it from a place that depends on the tensor's name, so that making a model costs next to
    nothing.
    """

    def __init__(self, spec: DecoderSpec | TowerSpec, dtype: DType, seed: int = 0) -> None:
        self.dtype: DType = dtype
        self.identity: str | None = None  # making them again costs less than keeping them
        self._shapes = tower_shapes(spec) if isinstance(spec, TowerSpec) else tensor_shapes(spec)
        self._seed = seed

    @functools.cached_property
    def _buffer(self) -> NDArray[Any]:
        # Made when the first tensor is asked for: by then it is known that the model fits into the memory.
        normals = np.random.default_rng(self._seed).standard_normal(_PERIOD, dtype=np.float32) * np.float32(_SCALE)
        largest = max(math.prod(shape) for shape in self._shapes.values())
        buffer = np.resize(_as_dtype(normals, self.dtype), _PERIOD + largest)
        buffer.flags.writeable = False
        return buffer

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def stored_format(self, name: str) -> None:
        """Nothing is quantized."""

    def __getitem__(self, name: str) -> DenseTensor:
        shape = self._shapes[name]
        if name.endswith(("norm.weight", "_sum_scale")):
            data = _as_dtype(np.ones(shape, np.float32), self.dtype)
        elif name.endswith("norm.bias"):
            data = np.zeros(shape, STORAGE[self.dtype])
        else:
            start = zlib.crc32(name.encode()) % _PERIOD
            data = self._buffer[start : start + math.prod(shape)].reshape(shape)
        return DenseTensor(data, self.dtype)


class DummySource:
    """Another source's model with random weights, in the dtype that its config names."""

    def __init__(self, source: ModelSource, seed: int = 0) -> None:
        self._source, self._seed = source, seed
        self.path = source.path

    @property
    def config(self) -> Mapping[str, Any]:
        """The source's own."""
        return self._source.config

    def generation(self, config: Mapping[str, Any] | None = None) -> GenerationConfig:
        """The source's own."""
        return self._source.generation(config)

    def tokenizer(self) -> Tokenizer:
        """The source's own."""
        return self._source.tokenizer()

    def mistral_tokenizer(self) -> Tokenizer:
        """The source's own."""
        return self._source.mistral_tokenizer()

    def weights(self, description: ModelDescription, config: Mapping[str, Any] | None = None) -> WeightSource:
        """Random weights. Raises ModelError for a dtype that is not known."""
        return DummyWeights(description.spec, dtype_from_config(self.config if config is None else config), self._seed)

    def tower(self, mmproj: str | None = None) -> TowerSource | None:
        """The source's own, with random weights."""
        tower = self._source.tower(mmproj) if isinstance(self._source, VisionSource) else None
        return None if tower is None else _DummyTower(tower, dtype_from_config(self.config), self._seed)


class _DummyTower:
    """Another tower with random weights."""

    def __init__(self, tower: TowerSource, dtype: DType, seed: int) -> None:
        self._tower, self._dtype, self._seed = tower, dtype, seed
        self.origin, self.is_found = tower.origin, tower.is_found

    def vision_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._tower.vision_config(config)

    def processor(self) -> Mapping[str, Any]:
        return self._tower.processor()

    def tower_weights(self, spec: TowerSpec, tensors: Mapping[str, Sequence[TensorRef]]) -> WeightSource:
        return DummyWeights(spec, self._dtype, self._seed)


def _as_dtype(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    return bfloat16_bits(values) if dtype == "bfloat16" else values.astype(STORAGE[dtype])
