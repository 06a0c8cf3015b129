"""safetensors checkpoints, single and sharded, as memory-mapped views.

The format: https://github.com/huggingface/safetensors#format. The `safetensors` library checks every file; the views
are our own, because numpy has no bfloat16 for it to return and because they copy nothing. Files are little-endian, and
so are the views, whatever the machine: who packs them swaps them.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..errors import ModelError
from ..files.folder import read_json
from ..files.reading import is_there, require_file
from ..files.wording import one_line, shown
from ..models import ModelDescription
from ..models.spec import tensor_shapes
from ..models.tensor_ref import TensorRef
from .dtypes import STORAGE, DType
from .tensor import WeightTensor

_DTYPES: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PIECE_BYTES = 1 << 20
_MAX_FILE_NAME = 255  # characters; no file system has longer ones
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file holds it. `dtype` is the file's word for it (F32, BF16, I32, ...); `data` its bytes."""

    path: Path
    version: tuple[str, int, int, int]  # of the file: where it lies, bytes, when content and inode changed last, in ns
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]  # a read-only view of the mapped file, from byte `start` on
    start: int


Checkpoint = dict[str, StoredTensor]


def open_checkpoint(folder: Path) -> Checkpoint:
    """All tensors of the checkpoint in `folder`, by the names they have there.

    Raises ModelError if there is no safetensors checkpoint, a shard is missing, or a file is corrupt or truncated.
    """
    if is_there(folder / _SINGLE):
        return _open_file(folder / _SINGLE)
    if is_there(folder / _INDEX):
        return _open_shards(folder)
    # Adapters belong beside a model; they are none.
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
    if len(files) == 1:
        return _open_file(files[0])
    if files:
        names = ", ".join(path.name for path in files)
        raise ModelError(f"{folder} has several weight files ({names}) but no {_INDEX} to join them")
    raise ModelError(_no_checkpoint(folder))


def _open_shards(folder: Path) -> Checkpoint:
    index = folder / _INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} must have a weight_map from tensor names to file names")
    names_by_file: dict[str, list[str]] = {}
    for name, file_name in weight_map.items():
        names_by_file.setdefault(file_name, []).append(name)
    checkpoint: Checkpoint = {}
    for file_name in sorted(names_by_file):
        if Path(file_name).name != file_name or not file_name.isprintable() or len(file_name) > _MAX_FILE_NAME:
            raise ModelError(f"{index} names {shown(file_name)}, which is not a file name")
        path = folder / file_name
        if not is_there(path):
            raise ModelError(f"{path}, a shard that {index.name} names, does not exist")
        shard = _open_file(path)
        for name in names_by_file[file_name]:
            if name not in shard:
                raise ModelError(f"{path} lacks tensor {shown(name)}, which {index.name} says is there")
            checkpoint[name] = shard[name]
    return checkpoint


def _open_file(path: Path) -> Checkpoint:
    require_file(path)
    # The library checks that the header is well-formed and that the tensors fill the file with no gap or overlap.
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        header_bytes = int.from_bytes(file[:8], "little")
        header: dict[str, Any] = json.loads(file[8 : 8 + header_bytes])
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{path} is not a valid safetensors file, it may be truncated or corrupt: {one_line(error)}"
        ) from error
    header.pop("__metadata__", None)
    content = np.frombuffer(file, np.uint8)
    # The change time cannot be set: it tells apart what copying tools give equal modification times.
    version = (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    checkpoint: Checkpoint = {}
    for name, entry in header.items():
        start, stop = (8 + header_bytes + offset for offset in entry["data_offsets"])
        shape = tuple(entry["shape"])
        checkpoint[name] = StoredTensor(path, version, entry["dtype"], shape, content[start:stop], start)
    return checkpoint


def _no_checkpoint(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles:
        return f"{folder} has no weights: there is no {_SINGLE}, {_INDEX} or other .safetensors file"
    return (
        f"{folder} has its weights as pickle ({', '.join(pickles[:3])}), which can run code when it is read and is "
        "never loaded; convert them to safetensors, for example with transformers: "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    )


class CheckpointWeights:
    """A checkpoint's tensors under Tidewheel's names. Checked on construction: what is returned has the right shape.

    The views of a file keep it mapped; it is unmapped when the last of them is gone.
    """

    def __init__(self, checkpoint: Checkpoint, description: ModelDescription) -> None:
        self._checkpoint = checkpoint
        self._prefix = description.base_prefix
        self._places: dict[str, tuple[StoredTensor, TensorRef]] = {}
        spec, sources = description.spec, dict(description.tensors)
        if spec.head.tied:
            sources["embed.weight"] = self._tied(sources["embed.weight"], description.head_name)
        bytes_by_dtype: Counter[DType] = Counter()
        parts = []
        for name, shape in tensor_shapes(spec).items():
            source = sources[name]
            stored = self._require(source.name)
            dtype = _check(stored, source, shape)
            bytes_by_dtype[dtype] += math.prod(shape) * STORAGE[dtype].itemsize
            self._places[name] = stored, source
            place = (*stored.version, stored.start, stored.dtype, stored.shape)
            parts.append((name, shape, *place, source.transpose, source.rows))
        self.dtype: DType = bytes_by_dtype.most_common(1)[0][0]
        self.identity: str | None = json.dumps(parts)

    def __getitem__(self, name: str) -> WeightTensor:
        stored, source = self._places[name]
        dtype = _DTYPES[stored.dtype]
        data, mapped = _aligned(stored.data, STORAGE[dtype].newbyteorder("<"))
        data = data.reshape(stored.shape)
        if source.transpose:
            data = data.T
        if source.rows is not None:
            data = data[source.rows[0] : source.rows[1]]
        return WeightTensor(data, dtype, mapped, f"{stored.path}: tensor {source.name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def _require(self, name: str) -> StoredTensor:
        stored = self._find(name)
        if stored is None:
            files = sorted({str(tensor.path) for tensor in self._checkpoint.values()}) or ["the checkpoint"]
            raise ModelError(f"tensor {name} is missing from {', '.join(files)}")
        return stored

    def _find(self, name: str) -> StoredTensor | None:
        return self._checkpoint.get(name) or self._checkpoint.get(name.removeprefix(self._prefix))

    def _tied(self, embedding: TensorRef, head_name: str) -> TensorRef:
        """Where the one matrix of embedding and head lies: under either name, or under both with equal content."""
        stored, head = self._find(embedding.name), self._find(head_name)
        if head is None:
            return embedding
        if stored is None:
            return TensorRef(head_name)
        if stored.dtype != head.dtype or not _equal(stored.data, head.data):
            raise ModelError(
                f"{head.path}: config.json says that head and embedding are tied, but {head_name} and {embedding.name} "
                "differ; set tie_word_embeddings to false in config.json if both are meant"
            )
        return embedding


def _check(stored: StoredTensor, source: TensorRef, needed: tuple[int, ...]) -> DType:
    """The tensor's dtype. Raises ModelError for one that is not supported, or another shape than is needed."""
    if stored.dtype not in _DTYPES:
        raise ModelError(
            f"{stored.path}: tensor {source.name} is stored as {stored.dtype}; supported are {', '.join(_DTYPES)}"
        )
    shape = stored.shape[::-1] if source.transpose else stored.shape
    if source.rows is not None and shape and shape[0] >= source.rows[1]:
        shape = (source.rows[1] - source.rows[0], *shape[1:])
    if shape != needed:
        raise ModelError(
            f"{stored.path}: tensor {source.name} has shape {stored.shape}, which does not fit config.json: "
            f"the model needs {_needed(source, needed)}"
        )
    return _DTYPES[stored.dtype]


def _aligned(data: NDArray[np.uint8], dtype: np.dtype[Any]) -> tuple[NDArray[np.generic], bool]:
    """`data` as `dtype`, and whether it is no copy: one is made where a file's header has an odd length."""
    mapped = data.ctypes.data % dtype.itemsize == 0
    return (data if mapped else data.copy()).view(dtype), mapped


def _equal(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> bool:
    # A piece at a time: what numpy makes of a comparison is as large as what it compares.
    pieces = range(0, len(a), _PIECE_BYTES)
    return len(a) == len(b) and all(np.array_equal(a[i : i + _PIECE_BYTES], b[i : i + _PIECE_BYTES]) for i in pieces)


def _needed(source: TensorRef, shape: tuple[int, ...]) -> str:
    needed = shape if source.rows is None else (f"at least {source.rows[1]}", *shape[1:])
    return "(" + ", ".join(str(size) for size in (reversed(needed) if source.transpose else needed)) + ")"
