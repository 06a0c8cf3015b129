"""The weights of a tower in a checkpoint, where a language model may lie beside it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..errors import ModelError
from ..models.spec import TowerSpec, tower_shapes
from ..models.tensor_ref import TensorRef
from .checkpoint import check_parts
from .dtypes import STORAGE, DType
from .quantization import TensorFormat
from .stored import Stored, StoredMatrix, StoredTensor
from .taking import Part, difference, format_of_parts, join, scaled, take
from .tensor import WeightTensor


class TowerWeights:
    """A tower's tensors under Tidewheel's names. All shapes are checked on construction.

    `tensors` has, for each name of `tower_shapes(spec)`, the places where it may lie: the first that is there counts.
    Raises ModelError for a tensor that is in none of them, is quantized though it is no matrix, or has another shape.
    """

    def __init__(self, checkpoint: Stored, spec: TowerSpec, tensors: Mapping[str, Sequence[TensorRef]]) -> None:
        self._checkpoint = checkpoint
        self._places: dict[str, list[Part]] = {}
        bytes_by_dtype: Counter[DType] = Counter()
        for name, shape in tower_shapes(spec).items():
            parts = self._places[name] = _parts(checkpoint, name, tensors[name])
            # What is quantized is computed in bfloat16: floats beside it are mostly vectors.
            dtype = check_parts(parts, shape) or "bfloat16"
            bytes_by_dtype[dtype] += math.prod(shape) * STORAGE[dtype].itemsize
        self.dtype: DType = bytes_by_dtype.most_common(1)[0][0]
        self.identity: str | None = json.dumps(
            [(name, [(stored.place, repr(ref)) for stored, ref in parts]) for name, parts in self._places.items()]
        )
        refs = [ref for parts in self._places.values() for _, ref in parts]
        self.stored_names = frozenset(name for ref in refs for name in (ref.name, ref.scaled_by) if name)

    def __getitem__(self, name: str) -> WeightTensor:
        return join([self._taken(stored, ref) for stored, ref in self._places[name]])

    def _taken(self, stored: StoredTensor | StoredMatrix, ref: TensorRef) -> WeightTensor:
        tensor = take(stored, ref)
        if ref.minus_rows is not None:
            return difference(tensor, take(stored, replace(ref, rows=ref.minus_rows)))
        if not ref.scaled_by:
            return tensor
        return scaled(tensor, take(self._checkpoint[ref.scaled_by], TensorRef(ref.scaled_by)))

    def stored_format(self, name: str) -> TensorFormat | None:
        """See `format_of_parts`."""
        return format_of_parts(self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)


def _parts(checkpoint: Stored, name: str, places: Sequence[TensorRef]) -> list[Part]:
    for ref in places:
        parts = [*ref.parts()]
        if all(part.name in checkpoint and (part.scaled_by or part.name) in checkpoint for part in parts):
            return [(checkpoint[part.name], part) for part in parts]
    paths = {stored.path for stored in checkpoint.values()}
    where = paths.pop() if len(paths) == 1 else "the checkpoint"
    raise ModelError(f"{where} has no tensor {places[0].name}, which is needed ({name})")
