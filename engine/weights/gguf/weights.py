"""The tensors of GGUF files under Tidewheel's names."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from ...models import ModelDescription
from ...models.spec import tensor_shapes
from ...models.tensor_ref import TensorRef
from ..block_types import dequantize
from ..drafts import not_loaded
from ..dtypes import STORAGE, DType
from ..quantization import TensorFormat, stored_as_blocks
from ..taking import rows_of, take_blocks
from ..tensor import DenseTensor, WeightTensor
from .architecture import GgufArchitecture
from .config import CONFIG_TENSORS
from .hybrids import log_of_decays
from .names import QWEN_MTP
from .reader import GgufTensor

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"blk\.(\d{1,6})\.")
_LAYER_NUMBER = re.compile(r"\.layers\.(\d{1,6})\.")
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d{1,6})\.(.+)")
_OF_OTHER_PARTS = ("v.", "a.", "mm.")  # of files that have towers for images and sound, too
_FEW_BLOCKS = 64  # one of them has a scale that is not 0, except in rare tensors
_MAGNITUDE = 0x7FFF  # of the bits of a half
FLOATS: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class TensorUse:
    """A weight that is taken of a file's tensor, of matrix `index` if it is a stack of them.

    `whole_rows`: it is a matrix, made of rows of the tensor as they are, so that both have the same inputs.
    """

    name: str
    index: int | None
    whole_rows: bool


class GgufWeights:
    """A WeightSource. Tensors are views of the file; matrices in blocks stay in them.

    All names and shapes are checked on construction. Raises ModelError, naming the file and the tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, GgufTensor],
        architecture: GgufArchitecture,
        config: Mapping[str, Any],
        description: ModelDescription,
    ) -> None:
        self._architecture, self._tensors = architecture, tensors
        self._places: dict[str, tuple[GgufTensor, TensorRef]] = {}
        self._uses: dict[str, list[TensorUse]] = {}
        self._with_scales: set[str] = set()  # tensors that were looked through: experts share one
        count: Counter[DType] = Counter()
        shapes = tensor_shapes(description.spec)
        # A layer for drafts is one of the layers to a file.
        refs = {name: _among_layers(description.tensors[name], config["num_hidden_layers"]) for name in shapes}
        in_file = {name: _name_in_layers(name, ref) for name, ref in refs.items()}
        shapes_in_file = {in_file[name]: shape for name, shape in shapes.items()}
        for name, shape in shapes.items():
            ref = refs[name]
            found = architecture.reference(in_file[name], ref, shapes_in_file, tensors.keys())
            stored = tensors.get(found.name) if found is not None else None
            if found is None or stored is None:
                file, missing = next(iter(tensors.values())).path, found or ref
                raise ModelError(f"{file} has no tensor {missing.name}, which the model needs")
            ref, stored = found, stored if found.index is not None else _as_needed(stored, found, shape)
            if ref.shape(stored.shape) != shape:
                raise ModelError(f"{stored.origin} has shape {stored.shape}, but the model needs {ref.needed(shape)}")
            whole_rows = not (ref.transpose or ref.flat or ref.transpose_each) and len(shape) == 2
            self._uses.setdefault(stored.name, []).append(TensorUse(name, ref.index, whole_rows))
            if ref.index is not None:
                stored, ref = stored.at(ref.index), replace(ref, index=None)
            if order := architecture.row_order(in_file[name], config):
                ref = replace(ref, permute=order)
            self._places[name] = (stored, ref)
            # A quantized file is computed in bfloat16: its floats are mostly vectors, which stay float32.
            count[FLOATS.get(stored.kind.name, "bfloat16")] += math.prod(shape)
        used = {stored.name for stored, _ in self._places.values()} | CONFIG_TENSORS
        drafts = {name for name in tensors.keys() - used if _is_for_drafts(name, config)}
        if drafts:
            unasked = description.mtp is not None and description.spec.mtp is None
            logger.info("%s", not_loaded(len(drafts), usable=unasked))
        left = {name for name in tensors.keys() - used - drafts if not name.startswith(_OF_OTHER_PARTS)}
        if unknown := sorted(name for name in left if not _is_unused(architecture, name, config)):
            raise ModelError(
                f"{tensors[unknown[0]].origin} does not belong to this architecture: the file contains an "
                "unsupported variant"
            )
        self.dtype: DType = count.most_common(1)[0][0]
        places = [(name, stored.place, ref.rows, ref.each) for name, (stored, ref) in self._places.items()]
        self.identity: str | None = json.dumps(["gguf", architecture.name, places])

    def uses(self, tensor: str) -> Sequence[TensorUse]:
        """What the model takes of a tensor of the file; nothing for one that it does not need."""
        return self._uses.get(tensor, ())

    def stored_format(self, name: str) -> TensorFormat | None:
        """The type of a matrix in blocks; None for floats, and for what becomes floats."""
        stored, ref = self._places[name]
        return stored_as_blocks(stored.kind) if _stays_in_blocks(stored, ref) else None

    def __getitem__(self, name: str) -> WeightTensor:
        stored, ref = self._places[name]
        if stored.kind.parts is not None and stored.name not in self._with_scales:
            require_scales(self._tensors[stored.name])
            self._with_scales.add(stored.name)
        if _stays_in_blocks(stored, ref):
            return blocks_of(stored, ref)
        tensor = floats_of(stored, ref)
        if (
            self._architecture.norms_plus_one
            and name.endswith("norm.weight")
            and not name.endswith("delta_head_norm.weight")
        ):
            return without_one(tensor, stored)
        if name.endswith(".A_log"):
            decays = log_of_decays(tensor.data.astype(np.float32), stored.origin)
            return DenseTensor(decays, "float32", origin=stored.origin)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)


def _stays_in_blocks(stored: GgufTensor, ref: TensorRef) -> bool:
    return (
        stored.kind.parts is not None
        and len(stored.shape) > 1
        and not (ref.transpose or ref.flat)
        and ref.transpose_each is None
    )


def blocks_of(stored: GgufTensor, ref: TensorRef) -> WeightTensor:
    """What `ref` takes of a matrix in blocks, as it is."""
    return take_blocks(stored.data.reshape(*stored.shape[:-1], -1), stored.kind, ref, stored.origin)


def floats_of(stored: GgufTensor, ref: TensorRef) -> DenseTensor:
    """What `ref` takes of a tensor, of one in blocks as float32."""
    whole, mapped = elements_of(stored)
    whole = whole.reshape(stored.shape)
    data = rows_of(whole.T if ref.transpose else whole, ref)
    dtype = FLOATS.get(stored.kind.name, "float32")
    return DenseTensor(data, dtype, mapped and np.may_share_memory(data, whole), stored.origin)


def without_one(norm: DenseTensor, stored: GgufTensor) -> DenseTensor:
    """The weight of a norm to which files have 1 added. Raises ModelError unless it is in float32."""
    if norm.dtype != "float32":
        raise ModelError(f"{stored.origin} is stored as {stored.kind.name}, but a norm must be F32")
    return DenseTensor(norm.data.astype(np.float32) - np.float32(1), "float32", origin=stored.origin)


def require_scales(stored: GgufTensor) -> None:
    """Raises ModelError if all blocks' scales are 0, in a stack all experts' too: they were never written."""
    blocks = stored.data.reshape(-1, stored.kind.bytes)
    for some in (blocks[:_FEW_BLOCKS], blocks):
        halves = (some[:, at : at + 2].view("<u2") & _MAGNITUDE for at in stored.kind.halves)
        if stored.kind.exponent or any(half.any() for half in halves):
            return
    raise ModelError(
        f"{stored.origin} has only scales of 0, which make all of it 0: the file is not complete, download it again"
    )


def _as_needed(stored: GgufTensor, ref: TensorRef, needed: tuple[int, ...]) -> GgufTensor:
    """A tensor whose shape in files is another: a row that is a vector, a vector that is a matrix, a matrix a head."""
    is_row = needed == (1, *stored.shape)
    is_flat = len(needed) == 1 and needed == (math.prod(stored.shape),) and not ref.flat
    of_heads = len(stored.shape) == 3 and needed == (stored.shape[0] * stored.shape[1], stored.shape[2])
    return replace(stored, shape=needed) if is_row or is_flat or of_heads else stored


def _among_layers(ref: TensorRef, num_layers: int) -> TensorRef:
    """Where the weight would be if a layer for drafts that lies below `mtp.` lay behind the model's, as in files."""
    if ref.name in QWEN_MTP:
        return replace(ref, name=f"model.layers.{num_layers}.{QWEN_MTP[ref.name]}")
    if found := _MTP_LAYER.fullmatch(ref.name):
        return replace(ref, name=f"model.layers.{num_layers + int(found[1])}.{found[2]}")
    return ref


def _name_in_layers(name: str, ref: TensorRef) -> str:
    """What a weight of a layer for drafts would be called if the layer were one of the model's; `name` for others."""
    found = _LAYER_NUMBER.search(ref.name)
    if found is None or not name.startswith("mtp.layer."):
        return name
    return f"layers.{found[1]}.{name.removeprefix('mtp.layer.')}"


def _is_for_drafts(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor is of a layer behind the model's own, which predicts further tokens."""
    found, layers = _LAYER.match(name), config["num_hidden_layers"]
    return found is not None and layers <= int(found[1]) < layers + config.get("num_nextn_predict_layers", 0)


def _is_unused(architecture: GgufArchitecture, name: str, config: Mapping[str, Any]) -> bool:
    """Whether the architecture says that the model does not need a tensor."""
    found = _LAYER.match(name)
    return found is not None and architecture.unused(int(found[1]), name[found.end() :], config)


def elements_of(stored: GgufTensor) -> tuple[NDArray[Any], bool]:
    """All elements in a row, of blocks float32, else as FLOATS says; and whether they are a view of the mapped file."""
    if stored.kind.name not in FLOATS:
        return dequantize(stored.data, stored.kind), False
    dtype = STORAGE[FLOATS[stored.kind.name]].newbyteorder("<")
    mapped = stored.start % dtype.itemsize == 0
    return (stored.data if mapped else stored.data.copy()).view(dtype), mapped
