"""The tensors of a GGUF file as a checkpoint's: floats, and matrices that stay in blocks."""

from __future__ import annotations

import functools
from dataclasses import replace

from ...models.tensor_ref import TensorRef
from ..quantization import stored_as_blocks
from ..stored import StoredMatrix, StoredTensor
from ..tensor import WeightTensor
from .reader import GgufFile, GgufTensor
from .weights import blocks_of, require_scales


def checkpoint_of(file: GgufFile) -> dict[str, StoredTensor | StoredMatrix]:
    """All tensors, by the names that they have in the file, those of a stack one below the other. No data is read."""
    return {name: _stored(tensor) for name, tensor in file.tensors.items()}


def _stored(tensor: GgufTensor) -> StoredTensor | StoredMatrix:
    kind, shape = tensor.kind, tensor.shape
    if len(shape) == 3:
        shape = (shape[0] * shape[1], shape[2])
    if kind.parts is None or len(shape) != 2:
        return StoredTensor(tensor.path, tensor.version, kind.name, shape, tensor.data, tensor.start)
    rows, columns = shape
    kept = functools.partial(stored_as_blocks, kind)
    matrix = replace(tensor, shape=(rows, columns))
    return StoredMatrix(tensor.path, (rows, columns), tensor.place, functools.partial(_blocks, matrix), kept)


def _blocks(tensor: GgufTensor) -> WeightTensor:
    require_scales(tensor)
    return blocks_of(tensor, TensorRef(tensor.name))
