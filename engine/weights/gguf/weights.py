"""The tensors of GGUF files under Tidewheel's names."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from ...models import ModelDescription
from ...models.spec import tensor_shapes
from ...models.tensor_ref import TensorRef
from ..dtypes import STORAGE, DType
from ..taking import rows_of
from ..tensor import DenseTensor
from .blocks import dequantize
from .names import CONFIG_TENSORS, GgufArchitecture
from .reader import GgufTensor

_FLOATS: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufWeights:
    """A WeightSource. Quantized tensors become float32 when they are asked for, one at a time; floats are views.

    All names and shapes are checked on construction. Raises ModelError, naming the file and the tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, GgufTensor],
        architecture: GgufArchitecture,
        config: Mapping[str, Any],
        description: ModelDescription,
    ) -> None:
        self._architecture = architecture
        self._places: dict[str, tuple[GgufTensor, TensorRef]] = {}
        count: Counter[DType] = Counter()
        for name, shape in tensor_shapes(description.spec).items():
            ref = description.tensors[name]
            stored_name = architecture.tensor_name(ref.name)
            stored = tensors.get(stored_name) if stored_name is not None else None
            if stored is None:
                file = next(iter(tensors.values())).path
                raise ModelError(f"{file} has no tensor {stored_name or ref.name}, which the model needs")
            ref = replace(ref, name=stored.name)
            if ref.shape(stored.shape) != shape:
                raise ModelError(f"{stored.origin} has shape {stored.shape}, but the model needs {ref.needed(shape)}")
            if order := architecture.row_order(stored.name, config):
                ref = replace(ref, permute=order)
            self._places[name] = (stored, ref)
            count[_FLOATS.get(stored.kind.name, "float32")] += math.prod(shape)
        used = {stored.name for stored, _ in self._places.values()} | CONFIG_TENSORS
        if unknown := sorted(tensors.keys() - used):
            raise ModelError(
                f"{tensors[unknown[0]].origin} is nothing that a model of this architecture has here: the file holds "
                "a variant that is not supported"
            )
        self.dtype: DType = count.most_common(1)[0][0]
        places = [(name, stored.place, ref.rows, ref.each) for name, (stored, ref) in self._places.items()]
        self.identity: str | None = json.dumps(["gguf", architecture.name, places])

    @property
    def quantized_types(self) -> tuple[str, ...]:
        """The block types among the tensors, in words, the most frequent first."""
        kinds = Counter(stored.kind.name for stored, _ in self._places.values() if stored.kind.name not in _FLOATS)
        return tuple(name for name, _ in kinds.most_common())

    def __getitem__(self, name: str) -> DenseTensor:
        stored, ref = self._places[name]
        whole, mapped = _floats(stored)
        dtype = _FLOATS.get(stored.kind.name, "float32")
        whole = whole.reshape(stored.shape)
        data = rows_of(whole.T if ref.transpose else whole, ref)
        if self._architecture.norms_plus_one and name.endswith("norm.weight"):
            if dtype != "float32":
                raise ModelError(f"{stored.origin} is stored as {stored.kind.name}, but a norm must be F32")
            data = data.astype(np.float32) - np.float32(1)
        return DenseTensor(data, dtype, mapped and np.may_share_memory(data, whole), stored.origin)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)


def _floats(stored: GgufTensor) -> tuple[NDArray[Any], bool]:
    """All elements, and whether they are a view of the mapped file."""
    if stored.kind.name not in _FLOATS:
        return dequantize(stored.data, stored.kind), False
    dtype = STORAGE[_FLOATS[stored.kind.name]].newbyteorder("<")
    mapped = stored.start % dtype.itemsize == 0
    return (stored.data if mapped else stored.data.copy()).view(dtype), mapped
