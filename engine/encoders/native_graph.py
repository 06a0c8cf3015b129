"""NativeGraph: an encoder from a checkpoint, computed by our own kernels on the CPU."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidewheel import _native

from ..devices.cpu.device import CpuDevice
from ..devices.executor import Executor
from ..devices.tower import Rows, TowerExecutor, TowerOptions
from ..errors import DeviceError, ModelError
from ..models.spec import NormSpec, TowerSpec, tower_shapes
from ..models.tensor_ref import TensorRef
from ..weights.checkpoint import open_checkpoint
from ..weights.dtypes import DType
from ..weights.finite import require_finite
from ..weights.mapped import leave_mapped
from ..weights.quantization import Quantization
from ..weights.stored import Stored
from ..weights.tensor import BlockTensor, DenseTensor, to_float32
from ..weights.tower import TowerWeights
from .graph import LOGITS, SPARSE, TOKEN_LOGITS, TOKEN_OUTPUTS, TOKEN_VECTORS, TOKEN_WEIGHTS, EncoderGraph
from .linears import TokenLayers, layers_beside
from .made_weights import Made, MadeWeights
from .model import EncoderModel, HeadSpec
from .options import EncoderDType
from .pooling import Floats, pool
from .task_adapters import TaskAdapters
from .tokenization import EncoderInput

T = TypeVar("T")

_FIRST_TYPE = np.zeros(1, np.int64)
_OF_A_LAYER = re.compile(r"(?:layers?|blk)\.(\d{1,9})\.")


class NativeGraph(EncoderGraph):
    """The texts of a batch lie behind each other, without padding. A text's bits do not depend on the others.

    The tables of words, positions and types stay in the checkpoint's mapped files, of which rows are copied.
    """

    pads = False

    def __init__(
        self,
        path: Path,
        model: EncoderModel,
        tower: TowerExecutor,
        tables: Mapping[str, DenseTensor | BlockTensor],
        activations: Mapping[str, str | None],
        info: Mapping[str, str],
        adapters: TaskAdapters | None = None,
    ) -> None:
        """`info` is as in EncoderGraph. `activations` are those that projections of layers beside the encoder need and
        do not have: `dense.0` and so on are behind the pooling, `tokens.0` and so on make the vectors of tokens, and
        `sparse` their weights.
        """
        self.path, self.info = path, info
        self._model, self._tower, self._tables, self._activations = model, tower, tables, activations
        self._dense = [name for name in activations if name.startswith("dense.")]
        self._of_tokens = [name for name in activations if name.startswith("tokens.")]
        if model.head is not None:
            self.outputs = ({"text": LOGITS, "tokens": TOKEN_LOGITS, "words": SPARSE}[model.head.of],)
            self.outputs += (TOKEN_LOGITS,) * model.head.fits_each_token
        else:
            vectors, weights = bool(self._of_tokens), "sparse" in activations
            self.outputs = (TOKEN_OUTPUTS[-1], *[TOKEN_VECTORS] * vectors, *[TOKEN_WEIGHTS] * weights)
        self._interrupted = threading.Event()
        self._adapters = adapters
        if model.embedding.num_types:
            self._first_type = self._looked_up("types", _FIRST_TYPE)
        if model.tasks is not None:
            self.adapters = tuple(model.tasks.prompts)

    def run(
        self, output: str, inputs: Sequence[EncoderInput], read: Sequence[Sequence[int]] | None = None
    ) -> Sequence[Floats]:
        """See EncoderGraph."""
        return self._finished(self.pieces(output, inputs, read))

    def pieces(
        self, output: str, inputs: Sequence[EncoderInput], read: Sequence[Sequence[int]] | None = None
    ) -> Generator[None, None, Sequence[Floats]]:
        """See EncoderGraph. Only layers and logits of words are cut; the rest is short."""
        lengths = [len(item) for item in inputs]
        starts = np.zeros(len(inputs) + 1, np.int32)
        np.cumsum(lengths, out=starts[1:])
        places = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], lengths)
        adapters = seen = None
        if any(item.adapter >= 0 for item in inputs):
            adapters = np.array([item.adapter for item in inputs], np.int32)
        rows = self._embedded(inputs, starts, places, None if adapters is None else np.repeat(adapters, lengths))
        if any(item.num_seen is not None for item in inputs):
            seen = np.array([len(item) if item.num_seen is None else item.num_seen for item in inputs], np.int32)
        if self._model.skips:
            rows = yield from self._layers_and_skips(rows, starts, places, seen, adapters)
        else:
            read_rows = self._read_rows(output, inputs, starts, read)
            rows = yield from self._tower.layers(
                rows, starts, places[None], seen=seen, in_place=True, adapters=adapters, read=read_rows
            )
        rows = self._normalized("final_norm", self._model.final_norm, rows)
        if output == LOGITS:
            return self._text_logits(_of_texts(rows, starts), inputs)
        if output == SPARSE:
            return (yield from self._words(self._before_out(rows), starts))
        if output == TOKEN_LOGITS:
            rows = self._projected("head.out", self._before_out(rows))
        elif output == TOKEN_VECTORS:
            for name in self._of_tokens:
                rows = self._projected(name, rows, self._activations[name])
        elif output == TOKEN_WEIGHTS:
            rows = np.maximum(self._projected("sparse", rows), 0)
        return _of_texts(rows, starts)

    def set_piece(self, seconds: float) -> None:
        """See EncoderGraph."""
        self._tower.piece_s = seconds

    @property
    def is_within_layer(self) -> bool:
        """See EncoderGraph."""
        return self._tower.is_within_layer

    def share_threads(self, beside: Executor) -> bool:
        """See EncoderGraph."""
        return self._tower.share_threads(beside)

    def use_threads(self, threads: object) -> bool:
        """See EncoderGraph."""
        return self._tower.use_threads(threads)

    def release_scratch(self) -> None:
        """See EncoderGraph. Rows of the tables that were looked up lie in the page cache, too."""
        self._tower.release_scratch()
        for table in self._tables.values():
            leave_mapped(table.data)

    @property
    def is_writing(self) -> bool:
        """See EncoderGraph."""
        return self._tower.is_writing

    def after_pooling(self, vectors: Floats) -> Floats:
        """The Dense modules, one after the other."""
        for name in self._dense:
            vectors = self._projected(name, vectors, self._activations[name])
        return vectors

    def interrupt(self) -> None:
        """See EncoderGraph."""
        self._interrupted.set()

    def close(self) -> None:
        """See EncoderGraph."""
        self._tower.close()

    def _embedded(
        self,
        inputs: Sequence[EncoderInput],
        starts: NDArray[np.int32],
        places: NDArray[np.int32],
        adapters: NDArray[np.int32] | None,
    ) -> Rows:
        embedding = self._model.embedding
        ids = np.concatenate([np.asarray(item.token_ids, np.int64) for item in inputs])
        rows = self._looked_up("words", ids)
        if self._adapters is not None and adapters is not None:
            self._adapters.add("words", rows, ids, adapters)
        if embedding.scale != 1:
            rows *= np.float32(embedding.scale)
        if embedding.num_positions:
            if embedding.padding_id is not None:
                counted = ids != embedding.padding_id
                numbers = np.cumsum(counted, dtype=np.int32)
                before = np.concatenate([np.zeros(1, np.int32), numbers])[starts[:-1]]
                places = np.where(counted, numbers - np.repeat(before, np.diff(starts)) - 1, -1)
                rows += self._looked_up("positions", places + embedding.first_position)
            else:
                self._add_positions(rows, starts)
        if embedding.num_types:
            types = self._types(inputs)
            rows += self._first_type if types is _FIRST_TYPE else self._looked_up("types", types)
            if self._adapters is not None and adapters is not None:
                self._adapters.add("types", rows, np.broadcast_to(types, ids.shape), adapters)
        return self._normalized("embedding_norm", embedding.norm, rows)

    def _add_positions(self, rows: Rows, starts: NDArray[np.int32]) -> None:
        """Adds the table's first rows to each text's: those are not copied for every text."""
        first = self._model.embedding.first_position
        table = self._looked_up("positions", slice(first, first + int(np.diff(starts).max())))
        for start, stop in pairwise(starts.tolist()):
            rows[start:stop] += table[: stop - start]

    def _types(self, inputs: Sequence[EncoderInput]) -> NDArray[np.int64]:
        """Of each token; one row for all if all are the same."""
        count = self._model.embedding.num_types
        if count == 1 or all(item.type_ids is None for item in inputs):
            return _FIRST_TYPE
        types = [np.zeros(len(item), np.int64) if item.type_ids is None else item.type_ids for item in inputs]
        joined = np.concatenate(types)
        if joined.max(initial=0) >= count:
            raise ModelError(f"the tokenizer gives the token type {joined.max()}, and {self.path} has {count} types")
        return joined

    def _looked_up(self, name: str, numbers: NDArray[np.integer] | slice) -> Rows:
        """Rows of a table, in an array of their own unless they are a slice of float32 numbers."""
        table = self._tables[name]
        rows: Any = table.data[numbers]
        found = replace(table, data=rows)
        if isinstance(found, DenseTensor) and found.dtype == "float32":
            return np.ascontiguousarray(found.data, np.float32)
        return to_float32(found)

    def _layers_and_skips(
        self,
        rows: Rows,
        starts: NDArray[np.int32],
        places: NDArray[np.int32],
        seen: NDArray[np.int32] | None,
        adapters: NDArray[np.int32] | None,
    ) -> Generator[None, None, Rows]:
        skips = self._model.skips
        for index in range(len(self._model.tower.layers)):
            before, skip = rows, skips.get(index)
            in_place = index > 0 and skip is None
            rows = yield from self._tower.layer(
                index, rows, starts, places[None], seen=seen, in_place=in_place, adapters=adapters
            )
            if skip is None:
                continue
            if skip.kernel_size is not None:
                ends = np.repeat(np.diff(starts), np.diff(starts)) - places
                windows = _windows(before, skip.kernel_size, places, ends)
                before = yield from self._tower.project(f"skips.{index}.conv", windows)
                before = np.tanh(before) if skip.activation == "tanh" else before
            rows = self._normalized(f"skips.{index}", skip.norm, rows + before)
        return rows

    def _read_rows(
        self,
        output: str,
        inputs: Sequence[EncoderInput],
        starts: NDArray[np.int32],
        read: Sequence[Sequence[int]] | None,
    ) -> NDArray[np.int32] | None:
        """The rows behind the last layer that are looked at; None: all."""
        if output == LOGITS:
            if self._head.pooling not in ("cls", "last"):
                return None
            last = self._head.pooling == "last"
            read = [[_last(item, self._head.padding_id) if last else 0] for item in inputs]
        elif output not in TOKEN_OUTPUTS or read is None:
            return None
        return np.concatenate(
            [np.array(of_text, np.int32) + start for of_text, start in zip(read, starts, strict=False)]
        )

    def _text_logits(self, texts: Sequence[Rows], inputs: Sequence[EncoderInput]) -> Sequence[Floats]:
        head = self._head
        if head.pooling == "last":
            rows = np.stack([text[_last(item, head.padding_id)] for text, item in zip(texts, inputs, strict=True)])
        else:
            rows = np.stack([pool(text, 0, (head.pooling,)) for text in texts])
        return list(self._projected("head.out", self._before_out(rows)))

    def _words(self, rows: Rows, starts: NDArray[np.int32]) -> Generator[None, None, Sequence[Floats]]:
        """The words of each text and their weights, `[k, 2]`. What is not finite is kept, for the caller to find."""
        head, found = self._head, [[np.empty((0, 2), np.float32)] for _ in starts[1:]]
        for name, begin, _ in head.outs:
            logits = yield from self._tower.project(name, rows)
            if head.pooling == "max":  # the weight rises with the logit, so only the largest needs one
                weights = _weights_of(np.maximum.reduceat(logits, starts[:-1]), twice=head.log_twice)
            else:
                each = _of_texts(_weights_of(logits, twice=head.log_twice), starts)
                weights = np.stack([text.sum(axis=0) for text in each])
            for text, own in zip(found, weights, strict=True):
                words = np.flatnonzero(~(own <= 0))
                text.append(np.stack([(begin + words).astype(np.float32), own[words]], axis=1))
        return [np.concatenate(parts) for parts in found]

    @property
    def _head(self) -> HeadSpec:
        assert self._model.head is not None
        return self._model.head

    def _before_out(self, rows: Rows) -> Rows:
        head = self._head
        if head.activation is not None:
            rows = self._projected("head.dense", rows, head.activation)
        return self._normalized("head.norm", head.norm, rows)

    def _projected(self, name: str, rows: Rows, activation: str | None = None) -> Rows:
        rows = self._finished(self._tower.project(name, rows))
        return np.tanh(rows) if activation == "tanh" else rows

    def _normalized(self, name: str, norm: NormSpec | None, rows: Rows) -> Rows:
        """The rows, normalized where they lie."""
        if norm is None:
            return rows
        weight = self._tower.table(f"{name}.weight")
        if norm.unit_offset:
            weight = weight + 1
        bias = None
        if norm.kind != "rms":
            bias = self._tower.table(f"{name}.bias") if norm.bias else np.zeros_like(weight)
        _native.normalize(self.info["isa"], rows, norm.eps, weight, bias)
        return rows

    def _finished(self, work: Generator[None, None, T]) -> T:
        while True:
            if self._interrupted.is_set():
                raise DeviceError("this encoder was stopped")
            try:
                next(work)
            except StopIteration as end:
                result: T = end.value
                return result


def load_native(
    folder: Path,
    model: EncoderModel,
    max_length: int,
    dense_folders: Sequence[Path],
    device: CpuDevice,
    *,
    token_layers: TokenLayers | None = None,
    dtype: EncoderDType,
    threads: int | None,
) -> NativeGraph:
    """The encoder whose checkpoint lies in `folder`, with its Dense modules, for texts of at most `max_length` tokens.

    It has as many `threads`, or as many as a chat model on the `device`. `folder` may also be a GGUF file, whose Dense
    modules the model has. `auto` keeps what the checkpoint has: its dtype, and blocks. Raises ModelError and
    DeviceError for what cannot be loaded.
    """
    checkpoint, tensors = dict(_opened(folder)), dict(model.tensors)
    linears = layers_beside(checkpoint, folder, model.tower.hidden_size, dense_folders, token_layers or TokenLayers())
    projections = list(model.tower.projections)
    for name, linear in linears.items():
        for kind, stored in linear.tensors.items():
            checkpoint[f"{name}.{kind}"] = stored
            tensors[f"{name}.{kind}"] = (TensorRef(f"{name}.{kind}"),)
        projections.append((name, linear.spec))
    spec = replace(model.tower, projections=tuple(projections))
    rows = tuple((name, (count, spec.hidden_size)) for name, count in model.embedding.tables.items())
    looked_up = TowerWeights(checkpoint, TowerSpec(spec.hidden_size, (), tables=rows), tensors)
    tables: dict[str, DenseTensor | BlockTensor] = {}
    for name in looked_up:
        table = looked_up[name]
        assert isinstance(table, DenseTensor | BlockTensor)
        require_finite([table], threads or 1)
        leave_mapped(table.data)  # few rows are ever used
        tables[name] = table
    weights = _weights(checkpoint, spec, tensors, model.made)
    adapters = None if model.tasks is None else TaskAdapters(checkpoint, model, model.tasks, threads or 1)
    used = weights.stored_names if adapters is None else weights.stored_names | adapters.stored_names
    _refuse_unused(folder, checkpoint, used, len(spec.layers))
    of_tower = () if adapters is None else tuple(adapters.of_tower())
    options = replace(_options(device, weights, max_length, dtype), threads=threads, adapters=of_tower)
    tower = device.load_tower(spec, weights, options)
    info = {
        "format": "GGUF" if folder.is_file() else "safetensors",
        "device": device.name,
        "isa": device.isa,
        "dtype": options.dtype,
        "weights": _kept_as(weights, options, dtype),
        "weight_bytes": str(device.tower_bytes(spec, weights, options)),
        "parameters": str(_num_parameters(spec, model)),
    }
    activations: dict[str, str | None] = {
        name: None for name, _ in model.tower.projections if name.startswith("dense.")
    }
    activations |= {name: linear.activation for name, linear in linears.items()}
    return NativeGraph(folder, model, tower, tables, activations, info, adapters)


def planned_weights(folder: Path, model: EncoderModel, max_length: int, dtype: EncoderDType) -> tuple[str, int]:
    """What the weights would be kept in, as `load_native` does it, and about how many bytes they would take with a text
    of `max_length` tokens, without Dense modules. Raises ModelError.
    """
    weights, device = _weights(_opened(folder), model.tower, model.tensors, model.made), CpuDevice()
    options = _options(device, weights, max_length, dtype)
    return _kept_as(weights, options, dtype), device.tower_bytes(model.tower, weights, options)


def _options(
    device: CpuDevice, weights: MadeWeights | TowerWeights, max_length: int, dtype: EncoderDType
) -> TowerOptions:
    if dtype == "int8" or dtype == "int8-channel":
        return TowerOptions("bfloat16", max_length, Quantization(dtype), keeps_quantized=False)
    chosen: DType = device.default_dtype(weights.dtype) if dtype == "auto" else dtype
    return TowerOptions(chosen, max_length, None, keeps_quantized=dtype == "auto")


def _weights(
    checkpoint: Stored,
    spec: TowerSpec,
    tensors: Mapping[str, tuple[TensorRef, ...]],
    made: Mapping[str, Made],
) -> MadeWeights | TowerWeights:
    return MadeWeights(checkpoint, spec, tensors, made) if made else TowerWeights(checkpoint, spec, tensors)


def _num_parameters(spec: TowerSpec, model: EncoderModel) -> int:
    looked_up = sum(model.embedding.tables.values()) * spec.hidden_size
    return looked_up + sum(math.prod(shape) for shape in tower_shapes(spec).values())


def _kept_as(weights: MadeWeights | TowerWeights, options: TowerOptions, dtype: EncoderDType) -> str:
    """What most of its matrices are kept in, as they are stored or as they are asked for."""
    if dtype != "auto":
        return dtype
    formats = [format for name in weights if (format := weights.stored_format(name)) is not None]
    return Counter(format.kind for format in formats).most_common(1)[0][0] if formats else options.dtype


def _opened(path: Path) -> Stored:
    if not path.is_file():
        return open_checkpoint(path)
    from ..weights.gguf.checkpoint import checkpoint_of
    from ..weights.gguf.source import GgufSource

    return checkpoint_of(GgufSource(path).file)


def _refuse_unused(folder: Path, checkpoint: Iterable[str], used: Collection[str], num_layers: int) -> None:
    """Raises ModelError if a layer has a weight that the architecture does not have: it would give other vectors."""
    for name in checkpoint:
        layer = _OF_A_LAYER.search(name)
        if layer and int(layer[1]) < num_layers and name.endswith((".weight", ".bias")) and name not in used:
            raise ModelError(
                f"{folder}: layers of this architecture have no tensor {name}: the model is of another kind"
            )


def _last(item: EncoderInput, padding_id: int | None) -> int:
    """The place of the last token that is not padding, as transformers finds it; 0 if there is none."""
    return next((place for place in reversed(range(len(item))) if item.token_ids[place] != padding_id), 0)


def _windows(rows: Rows, size: int, places: NDArray[np.int32], left: NDArray[np.int32]) -> Rows:
    """The rows around each: `[N, width * size]`, `size` numbers of each column, 0 where the text has none. A row has
    `places` before it in its text, and `left` from itself to the end.
    """
    windows = np.zeros((*rows.shape, size), np.float32)
    for column, away in enumerate(range(-(size // 2), size // 2 + 1)):
        there = np.flatnonzero((places + away >= 0) & (away < left))
        windows[there, :, column] = rows[there + away]
    return windows.reshape(len(rows), -1)


def _of_texts(rows: Rows, starts: NDArray[np.int32]) -> list[Rows]:
    return [rows[start:stop] for start, stop in pairwise(starts.tolist())]


def _weights_of(logits: Rows, *, twice: bool) -> Rows:
    weights: Rows = np.log1p(np.maximum(logits, 0))
    return np.log1p(weights) if twice else weights
