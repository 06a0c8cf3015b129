"""safetensors checkpoints, single and sharded, as memory-mapped views.

The format: https://github.com/huggingface/safetensors#format. The `safetensors` library checks every file; the views
are our own, because numpy has no bfloat16 for it to return and because they copy nothing. Files are little-endian, and
so are the views on every machine: the packing swaps the bytes.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..errors import ModelError
from ..files.copies import FileCopy
from ..files.folder import read_json
from ..files.reading import is_there, read_part, require_file
from ..files.wording import one_line, shown
from ..models import ModelDescription
from ..models.spec import tensor_shapes
from ..models.tensor_ref import TensorRef
from ..models.text_part import parts_of, text_name
from .drafts import draft_tensors, no_mtp, not_loaded
from .dtypes import STORAGE, DType
from .kv_scales import KvScales, StoredKvScales
from .pickles import PYTORCH, PYTORCH_INDEX, pickles_in, refused_folder
from .quantization import TensorFormat
from .quantized import ExpertReader, LayerReader, LayerTensors
from .safetensors_faults import fault_in, tensor_at_fault
from .safetensors_header import MAX_HEADER_BYTES, tensors_in
from .stored import FLOATS, Checkpoint, StoredMatrix, StoredTensor
from .taking import Part, format_of_parts, join, origin, take
from .tensor import WeightTensor

logger = logging.getLogger(__name__)

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PIECE_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100 << 20  # as the library has it
_MAX_FILE_NAME = 255  # characters; no file system has longer ones


def open_checkpoint(folder: Path, load_format: str = "auto") -> Checkpoint:
    """All tensors of the checkpoint in `folder`, by the names they have there. PyTorch's files are read where there
    are no safetensors. The load formats `safetensors` and `pt` are for one of the two alone.

    Raises ModelError if there is no checkpoint, a shard is missing, or a file is corrupt or truncated.
    """
    if load_format != "pt" and (checkpoint := _safetensors(folder)) is not None:
        return checkpoint
    from .pytorch_file import NotPlainTensorsError, open_pytorch_file  # with what reads pickles, which few models need

    try:
        if load_format == "safetensors":
            raise ModelError(f"{folder} has no safetensors, but --load-format is safetensors: leave that option out")
        if is_there(folder / PYTORCH):
            return open_pytorch_file(folder / PYTORCH)
        if is_there(folder / PYTORCH_INDEX):
            return _open_shards(folder / PYTORCH_INDEX, open_pytorch_file)
    except NotPlainTensorsError as error:
        raise _no_checkpoint(folder, str(error)) from error
    if load_format == "pt":
        raise ModelError(f"{folder} has no {PYTORCH} and no {PYTORCH_INDEX}, but --load-format is pt: leave it out")
    raise _no_checkpoint(folder)


def _safetensors(folder: Path) -> Checkpoint | None:
    if is_there(folder / _SINGLE):
        return open_file(folder / _SINGLE)
    if is_there(folder / _INDEX):
        return _open_shards(folder / _INDEX, open_file)
    # An adapter may be stored beside a model; it is not the model.
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
    if len(files) == 1:
        return open_file(files[0])
    if files:
        names = ", ".join(path.name for path in files)
        raise ModelError(f"{folder} has several weight files ({names}) but no {_INDEX} to join them")
    return None


def _open_shards(index: Path, open_one: Callable[[Path], Checkpoint]) -> Checkpoint:
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
        path = index.with_name(file_name)
        if not is_there(path):
            raise ModelError(f"{path}, a shard that {index.name} names, does not exist")
        shard = open_one(path)
        for name in names_by_file[file_name]:
            if name not in shard:
                raise ModelError(f"{path} lacks tensor {shown(name)}, which {index.name} says is there")
            checkpoint[name] = shard[name]
    return checkpoint


def open_file(path: Path) -> Checkpoint:
    """All tensors of one safetensors file. Raises ModelError for one that is corrupt or truncated."""
    require_file(path)
    try:
        _require_well_formed(path)
        with path.open("rb") as opened:
            status = os.fstat(opened.fileno())
            file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (SafetensorError, OSError, ValueError) as error:
        raise _corrupt(path, error) from error
    # Copying tools may give two files equal modification times. The change time cannot be set, so it differs.
    version = (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return dict(_Views(path, file, version, _header(path, file)))


def open_copy(path: Path, max_tensors: int) -> Mapping[str, StoredTensor]:
    """Like `open_file`, but of a copy in memory, for an adapter that may be written meanwhile. Raises ModelError, also
    for more than `max_tensors` tensors.
    """
    copy = FileCopy(path)
    content = copy.content
    try:
        length = int.from_bytes(content[:8], "little")
        header = tensors_in(content[8 : 8 + min(length, MAX_HEADER_BYTES + 1)], max_tensors)
        fault = fault_in(header, len(content) - 8 - length)
    except ValueError as error:
        fault = one_line(error)
    if fault is not None:
        raise _at_fault(path, fault)
    return _Views(path, content, copy.version, header)


def shapes_in(path: Path, max_tensors: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of an adapter's tensors. Only the header is read. Raises as `open_copy`."""
    length = int.from_bytes(read_part(path, 8), "little")
    try:
        header = tensors_in(read_part(path, 8 + min(length, MAX_HEADER_BYTES + 1))[8:], max_tensors)
        for name, entry in header.items():
            yield name, tuple(map(int, entry["shape"]))
    except (ValueError, AttributeError, TypeError, LookupError) as error:
        raise _at_fault(path, one_line(error)) from error


def _require_well_formed(path: Path) -> None:
    """The library checks that the header is well-formed and that the tensors fill the file with no gap or overlap."""
    with safe_open(path, framework="numpy"):
        pass


def _corrupt(path: Path, error: Exception) -> ModelError:
    return _at_fault(path, tensor_at_fault(path, _MAX_HEADER_BYTES) or one_line(error))


def _at_fault(path: Path, fault: str) -> ModelError:
    return ModelError(f"{path} is not a valid safetensors file, it may be truncated or corrupt: {fault}")


def _header(path: Path, file: mmap.mmap) -> dict[str, Any]:
    """What the header of a well-formed file says of each tensor."""
    try:
        header: dict[str, Any] = json.loads(file[8 : 8 + int.from_bytes(file[:8], "little")])
    except ValueError as error:
        raise _corrupt(path, error) from error
    header.pop("__metadata__", None)
    return header


class _Views(Mapping[str, StoredTensor]):
    """The tensors of a well-formed file. `header` says where each one lies. A view is made when it is asked for: an
    adapter's file may have many tensors that its model does not.
    """

    def __init__(
        self,
        path: Path,
        file: bytes | mmap.mmap,
        version: tuple[str, int, int, int],
        header: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._path, self._version, self._header = path, version, header
        self._begin = 8 + int.from_bytes(file[:8], "little")
        self._content = np.frombuffer(file, np.uint8)

    def __getitem__(self, name: str) -> StoredTensor:
        entry = self._header[name]
        start, stop = (self._begin + offset for offset in entry["data_offsets"])
        data = self._content[start:stop]
        return StoredTensor(self._path, self._version, entry["dtype"], tuple(entry["shape"]), data, start)

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def __len__(self) -> int:
        return len(self._header)


def _no_checkpoint(folder: Path, reason: str = "") -> ModelError:
    pickles = pickles_in(path.name for path in folder.glob("*"))
    if not pickles:
        return ModelError(f"{folder} has no weights: there is no {_SINGLE}, {_INDEX} or other .safetensors file")
    for name in pickles:
        require_file(folder / name)
    return refused_folder(str(folder), pickles, reason)


def open_weights(
    folder: Path, description: ModelDescription, reader: LayerReader | None = None, load_format: str = "auto"
) -> CheckpointWeights:
    """The weights of the model in `folder`, whose quantized layers `reader` reads. Raises ModelError, naming the file
    and the tensor.
    """
    checkpoint = open_checkpoint(folder, load_format)
    if description.text_part:
        checkpoint = _text_part(checkpoint, description)
    prefix, num_layers = f"{description.base_prefix}layers.", len(description.spec.layers)
    drafts = draft_tensors(checkpoint, prefix, num_layers)
    if description.spec.mtp is not None:
        if not drafts:
            raise no_mtp(str(folder))
    elif drafts:
        logger.info("%s", not_loaded(len(drafts), usable=description.mtp is not None))
    return CheckpointWeights(checkpoint, description, reader)


def _text_part(checkpoint: Checkpoint, description: ModelDescription) -> Checkpoint:
    """The tensors of the language model, by the names that they have where it is alone."""
    text: Checkpoint = {}
    others = []
    for name, stored in checkpoint.items():
        alone = text_name(name, description)
        if alone is None:
            others.append(name)
        elif alone in text:
            raise ModelError(f"{stored.path} has the language model's tensor {alone} twice, once as {shown(name)}")
        else:
            text[alone] = stored
    tower = description.tower_tensors
    if left := [name for name in others if name not in tower]:
        served = "the language model and its vision tower are" if tower else "the language model is"
        logger.info("only %s served; %d tensors of %s are not loaded", served, len(left), parts_of(left))
    return text


class CheckpointWeights:
    """A checkpoint's tensors under Tidewheel's names. All shapes are checked on construction.

    The views of a file keep it mapped; it is unmapped when the last of them is gone.
    """

    def __init__(
        self, checkpoint: Checkpoint, description: ModelDescription, reader: LayerReader | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._description = description
        # No method: the quantized matrices in `_places` hold it, and a cycle would keep the files mapped.
        self._find = functools.partial(_find, checkpoint, description.base_prefix)
        self._reader = reader
        self._places: dict[str, list[Part]] = {}
        spec, sources = description.spec, dict(description.tensors)
        if spec.head.tied:
            sources["embed.weight"] = self._tied(sources["embed.weight"], description.head_name)
        shapes = tensor_shapes(spec)
        for name, ref in sources.items():
            others = description.otherwise(name)
            found = [(other, stored) for other in others if (stored := self._stored(other.name))]
            if found and self._stored(ref.name) is None:
                fitting = (other for other, stored in found if other.shape(stored.shape) == shapes[name])
                sources[name] = next(fitting, found[-1][0])
        bytes_by_dtype: Counter[DType] = Counter()
        places = []
        for name, shape in shapes.items():
            others = description.otherwise(name)
            parts = self._places[name] = [self._part(ref, others) for ref in sources[name].parts()]
            dtype = check_parts(parts, shape)
            if dtype is not None:
                bytes_by_dtype[dtype] += math.prod(shape) * STORAGE[dtype].itemsize
            where = [
                (
                    stored.place,
                    *(ref.index, ref.transpose, ref.each, ref.rows, ref.permute, ref.flat, ref.transpose_each),
                    *([ref.matrix] if ref.matrix else []),
                )
                for stored, ref in parts
            ]
            places.append((name, shape, where))
        self._tell_unused_biases()
        # Of a quantized checkpoint, the layers that are not quantized decide.
        self.dtype: DType = bytes_by_dtype.most_common(1)[0][0] if bytes_by_dtype else "float32"
        self.identity: str | None = json.dumps(places)

    def __getitem__(self, name: str) -> WeightTensor:
        return join([take(stored, ref) for stored, ref in self._places[name]])

    def parts(self, name: str) -> Sequence[Part]:
        """What a tensor is taken from, in the order of its rows."""
        return self._places[name]

    def stored_format(self, name: str) -> TensorFormat | None:
        """See `format_of_parts`."""
        return format_of_parts(self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def has_kv_scales(self) -> bool:
        """Whether there are scales of K and V: see `ScaledWeights`."""
        return self._kv_scales().there()

    def kv_scales(self, *, required: bool) -> KvScales | None:
        """What K and V of each layer are divided by in a cache of e4m3: see `ScaledWeights`."""
        return self._kv_scales().read(required=required)

    def _kv_scales(self) -> StoredKvScales:
        return StoredKvScales(self._description, self._find, self._files())

    def _tell_unused_biases(self) -> None:
        """A config without the biases that its weights were trained with makes another model, and no shape tells."""
        used = {ref.name for parts in self._places.values() for _, ref in parts}
        biases = {name.removesuffix("weight") + "bias" for name in used if name.endswith(".weight")} - used
        # Some tools write biases of zeros for layers that have none.
        left = sorted(name for name in biases if (stored := self._find(name)) is not None and stored.data.any())
        if left:
            logger.warning(
                "%s: these biases are not used, because config.json says that there are none: %s%s. Answers will be "
                "wrong if this is not the config of these weights",
                self._files(),
                left[0],
                f", and {len(left) - 1} more like it" if len(left) > 1 else "",
            )

    def _files(self) -> str:
        files = sorted({str(tensor.path) for tensor in self._checkpoint.values()}) or ["the checkpoint"]
        return ", ".join(files)

    def _part(self, ref: TensorRef, others: tuple[TensorRef, ...]) -> Part:
        """What `ref` is taken from, and what is left to take from that. `others` are other places where it may be."""
        if isinstance(self._reader, ExpertReader) and ref.index is not None and ref.transpose:
            experts, _, name = ref.name.rpartition(".")
            expert = self._reader.expert(LayerTensors(experts, self._find), name, ref.index)
            if expert is not None:  # its rows are the outputs already
                return expert, replace(ref, index=None, transpose=False)
        stored = self._stored(ref.name)
        if stored is None:
            instead = f", and so is {others[0].name}, which could be in its place" if others else ""
            raise ModelError(f"tensor {ref.name} is missing from {self._files()}{instead}")
        return stored, ref

    def _stored(self, name: str) -> StoredTensor | StoredMatrix | None:
        return self._quantized(name) or self._find(name)

    def _quantized(self, name: str) -> StoredMatrix | None:
        layer = name.removesuffix(".weight")
        if self._reader is None or layer == name:
            return None
        return self._reader.matrix(LayerTensors(layer, self._find))

    def _tied(self, embedding: TensorRef, head_name: str) -> TensorRef:
        """Where the one matrix of embedding and head lies: under either name, or under both with equal content."""
        stored, head = self._find(embedding.name), self._find(head_name)
        quantized = self._quantized(head_name)
        if quantized is not None:
            raise ModelError(
                f"{quantized.path}: config.json says that head and embedding are tied, but {head_name} is quantized by "
                "itself; set tie_word_embeddings to false in config.json"
            )
        if head is None:
            return embedding
        if stored is None:
            return TensorRef(head_name)
        if stored.dtype != head.dtype or not equal_bytes(stored.data, head.data):
            raise ModelError(
                f"{head.path}: config.json says that head and embedding are tied, but {head_name} and {embedding.name} "
                "differ; set tie_word_embeddings to false in config.json if both are meant"
            )
        return embedding


def _find(checkpoint: Checkpoint, prefix: str, name: str) -> StoredTensor | None:
    return checkpoint.get(name) or checkpoint.get(name.removeprefix(prefix))


def check_parts(parts: list[Part], needed: tuple[int, ...]) -> DType | None:
    """The parts' dtype; None if one is quantized. Raises ModelError for a dtype that is not supported, or if the parts
    do not make the shape needed.
    """
    for stored, ref in parts:
        if isinstance(stored, StoredTensor) and stored.dtype not in FLOATS:
            raise ModelError(f"{origin(stored, ref)} is stored as {stored.dtype}; supported are {', '.join(FLOATS)}")
        if isinstance(stored, StoredMatrix) and (ref.transpose or ref.index is not None):
            raise ModelError(f"{origin(stored, ref)} is quantized, which is not supported for this architecture")
    if len(parts) == 1:
        stored, ref = parts[0]
        if ref.shape(stored.shape) != needed:
            raise ModelError(
                f"{origin(stored, ref)} has shape {stored.shape}, which does not fit config.json: "
                f"the model needs {ref.needed(needed)}"
            )
    else:
        _check_joined(parts, needed)
    dtypes = [FLOATS[stored.dtype] for stored, _ in parts if isinstance(stored, StoredTensor)]
    return dtypes[0] if len(dtypes) == len(parts) else None


def _check_joined(parts: list[Part], needed: tuple[int, ...]) -> None:
    shapes = [ref.shape(stored.shape) for stored, ref in parts]
    rows = sum(shape[0] for shape in shapes if shape)
    if rows != needed[0] or any(not shape or shape[1:] != needed[1:] for shape in shapes):
        found = ", ".join(f"{origin(stored, ref)} has shape {stored.shape}" for stored, ref in parts)
        raise ModelError(
            f"{found}, which do not fit config.json: the parts that the model uses must form the shape {needed}"
        )
    dense = [(stored, ref) for stored, ref in parts if isinstance(stored, StoredTensor)]
    for stored, ref in dense[1:]:
        if stored.dtype != dense[0][0].dtype:
            raise ModelError(
                f"{origin(stored, ref)} is stored as {stored.dtype}, but {dense[0][1].name}, to which it is joined, "
                f"as {dense[0][0].dtype}; convert one of them"
            )


def equal_bytes(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> bool:
    """Whether two tensors have the same bytes."""
    # A piece at a time: the result of numpy's comparison is as large as what it compares.
    pieces = range(0, len(a), _PIECE_BYTES)
    return len(a) == len(b) and all(np.array_equal(a[i : i + _PIECE_BYTES], b[i : i + _PIECE_BYTES]) for i in pieces)
