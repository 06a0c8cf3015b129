"""GGUF files written anew in types of fewer bits."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidewheel import __version__

from ..errors import ModelError
from ..models import ModelDescription
from ..weights.block_mix import BlockMix, block_kind
from ..weights.block_types import KINDS, BlockKind, BlockType, dequantize
from ..weights.dtypes import STORAGE
from ..weights.gguf.file_types import file_type_number
from ..weights.gguf.reader import GgufTensor, raw_metadata
from ..weights.gguf.source import GgufSource
from ..weights.gguf.weights import FLOATS, GgufWeights, TensorUse
from ..weights.gguf.writer import GgufLayout, NewTensor, uint32
from ..weights.quantization import stays_in_floats
from ..weights.quantizing import quantize
from ..weights.tensor import DenseTensor, to_float32
from .partial_file import PartialFile
from .report import Report, TensorReport, relative_error
from .statistics import Calibration, InputStatistics

_PIECE_ELEMENTS = 1 << 24  # in memory at a time, as float32 and what it is quantized to
_QUANTIZATION_VERSION = 2  # of the blocks' layouts, since 2023


@dataclass(frozen=True, slots=True)
class _Plan:
    """What becomes of a tensor: `block` is its new type; None: it is copied, and `note` may say why."""

    tensor: GgufTensor
    uses: Sequence[TensorUse]
    block: BlockKind | None = None
    note: str | None = None

    @property
    def kind(self) -> BlockType:
        return self.tensor.kind if self.block is None else KINDS[self.block]

    @property
    def new(self) -> NewTensor:
        return NewTensor(self.tensor.name, self.kind, self.tensor.shape)


def quantize_gguf(
    source: GgufSource,
    description: ModelDescription,
    out: Path,
    mix: BlockMix,
    *,
    calibration: Calibration | None = None,
    text_identity: str = "",
    threads: int = 1,
    on_progress: Callable[[int, int], object] = lambda done, whole: None,
) -> Report:
    """Write the model of a GGUF file to another one, with its matrices in the types of `mix`.

    With a `calibration`, whose text `text_identity` identifies, weights are chosen for the least error of outputs.
    `on_progress` is called with the bytes that are done, and those of the whole file. A run that was interrupted is
    completed by the next one with the same arguments. Raises ModelError for what cannot be read or written.
    """
    weights = source.weights(description)
    plans = [_plan(tensor, weights, description, mix) for tensor in source.file.tensors.values()]
    metadata = {
        key: value
        for key, value in raw_metadata(source.file.path).items()
        if not key.startswith("split.") and key != "general.alignment"
    }
    metadata["general.file_type"] = uint32(file_type_number(mix))
    metadata["general.quantization_version"] = uint32(_QUANTIZATION_VERSION)
    layout = GgufLayout(metadata, [plan.new for plan in plans])
    places = [plan.tensor.place for plan in plans]
    identity = hashlib.sha256(json.dumps([__version__, mix, text_identity, places]).encode()).hexdigest()
    with PartialFile(out, identity, layout.size) as file:
        file.write(0, [layout.header])
        left = [plan for plan in plans if plan.block is not None and plan.tensor.name not in file.done]
        statistics = _gather(calibration, left)
        done = 0
        for plan, start in zip(plans, layout.starts, strict=True):
            if plan.tensor.name not in file.done:
                _write(file, plan, start, statistics, threads, calibrated=calibration is not None)
            done += plan.new.num_bytes
            on_progress(done, layout.size)
        for plan, start in zip(plans, layout.starts, strict=True):
            file.verify(f"tensor {plan.tensor.name}", start, plan.new.num_bytes, file.done[plan.tensor.name]["crc"])
        GgufSource(file.part).weights(description)
        reports = [msgspec.convert(file.done[plan.tensor.name]["report"], TensorReport) for plan in plans]
        file.finish()
    return Report(reports)


def _plan(tensor: GgufTensor, weights: GgufWeights, description: ModelDescription, mix: BlockMix) -> _Plan:
    uses = weights.uses(tensor.name)
    if len(tensor.shape) < 2:
        return _Plan(tensor, uses)
    why = None
    if not uses:
        why = "the model does not compute with it here"
    elif not all(use.whole_rows for use in uses):
        why = "it is no plain matrix"
    elif any(stays_in_floats(use.name) for use in uses):
        why = "rounding it would change too much"
    elif tensor.kind.name == "MXFP4":
        why = "it was trained in these bits"
    if why is not None:
        return _Plan(tensor, uses, note=why)
    spec, inputs = description.spec, tensor.shape[-1]
    block = block_kind(mix, uses[0].name, inputs, len(spec.layers), tied=spec.head.tied)
    if block is None:
        return _Plan(tensor, uses, note=f"its rows of {inputs} are no multiple of 32")
    return _Plan(tensor, uses, None if KINDS[block] is tensor.kind else block)


def _gather(calibration: Calibration | None, plans: Sequence[_Plan]) -> Mapping[str, InputStatistics]:
    names = [use.name for plan in plans for use in plan.uses]
    return calibration.gather(names) if calibration is not None and names else {}


def _write(
    file: PartialFile,
    plan: _Plan,
    start: int,
    statistics: Mapping[str, InputStatistics],
    threads: int,
    *,
    calibrated: bool,
) -> None:
    tensor, error, note = plan.tensor, None, plan.note
    if plan.block is not None:
        errors, importances = _Errors(), _importances(plan, statistics)
        checksum = file.write(start, _quantized(plan, plan.block, importances, threads, errors))
        error = errors.relative
        blind = sum(importance is None for importance in importances)
        if calibrated and blind:
            note = f"the text says nothing about {f'{blind} of its experts' if len(importances) > 1 else 'its inputs'}"
    else:
        checksum = file.write(start, [tensor.data])
    report = TensorReport(tensor.name, tensor.shape, plan.kind.name, plan.new.num_bytes, error, note)
    file.complete(tensor.name, crc=checksum, report=asdict(report))


def _importances(plan: _Plan, statistics: Mapping[str, InputStatistics]) -> list[NDArray[np.float32] | None]:
    """How much each input of each matrix counts; None where nothing is known. A stack has several matrices."""
    matrices = math.prod(plan.tensor.shape[:-2])
    found: list[NDArray[np.float32] | None] = [None] * matrices
    for use in plan.uses:
        if (seen := statistics.get(use.name)) is not None:
            for matrix in range(matrices) if use.index is None else [use.index]:
                found[matrix] = seen.squares
    return found


class _Errors:
    """The squares of errors, weighted as the quantizer weights them, and of what they are errors of."""

    def __init__(self) -> None:
        self._error, self._whole = 0.0, 0.0

    def add(
        self, exact: NDArray[np.float32], rounded: NDArray[np.float32], importance: NDArray[np.float32] | None
    ) -> None:
        counts = np.ones(exact.shape[1]) if importance is None else importance / importance.mean(dtype=np.float64)
        self._whole += float(_squares(exact) @ counts)
        self._error += float(_squares(rounded - exact) @ counts)

    @property
    def relative(self) -> float:
        return relative_error(self._error, self._whole)


def _squares(matrix: NDArray[np.float32]) -> NDArray[np.float64]:
    """The sum of the squares of each column."""
    squares: NDArray[np.float64] = np.einsum("nk,nk->k", matrix, matrix, dtype=np.float64)
    return squares


def _quantized(
    plan: _Plan, block: BlockKind, importances: Sequence[NDArray[np.float32] | None], threads: int, errors: _Errors
) -> Iterator[NDArray[np.uint8]]:
    tensor, inputs = plan.tensor, plan.tensor.shape[-1]
    rows = tensor.data.reshape(len(importances), tensor.shape[-2], -1)
    step = max(_PIECE_ELEMENTS // inputs, 1)
    for matrix, importance in zip(rows, importances, strict=True):
        for begin in range(0, len(matrix), step):
            floats = _floats(matrix[begin : begin + step], tensor, inputs)
            try:
                blocks = quantize(floats, block, threads=threads, importance=importance, thorough=True)
            except ValueError as error:
                raise ModelError(f"{tensor.origin}: {error}") from error
            errors.add(to_float32(floats), dequantize(blocks.data, plan.kind).reshape(-1, inputs), importance)
            yield blocks.data


def _floats(rows: NDArray[np.uint8], tensor: GgufTensor, inputs: int) -> DenseTensor:
    """Rows of a tensor as floats of a type that the quantizer takes."""
    if tensor.kind.parts is not None:
        return DenseTensor(dequantize(rows, tensor.kind).reshape(-1, inputs), "float32")
    dtype = FLOATS[tensor.kind.name]
    return DenseTensor(np.ascontiguousarray(rows).view(STORAGE[dtype].newbyteorder("<")), dtype)
