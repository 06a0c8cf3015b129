"""A Hugging Face folder of floats, written anew as a quantized one that other servers read too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..models import describe
from ..weights import open_weights
from ..weights.bits import unpack
from ..weights.checkpoint import equal_bytes, open_checkpoint, open_file
from ..weights.finite import require_finite
from ..weights.folder_source import FolderSource
from ..weights.gguf.choosing import find_gguf
from ..weights.quantized import LayerTensors, layer_reader, method_in_words
from ..weights.stored import Checkpoint
from ..weights.tensor import QuantizedTensor, WeightTensor, to_float32
from .choosing import Choice, choose
from .gathering import Gathering
from .gptq import round_matrix
from .journal import Journal
from .layouts import LAYOUTS, FolderMethod
from .report import Report, TensorReport
from .statistics import Calibration
from .whole_files import FileTensor, copy_file, file_tensor, replacing, write_json, write_safetensors

_INDEX = "model.safetensors.index.json"
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack", ".index.json",
)  # fmt: skip
_VERSION = "1"  # of what is computed and written: a quantization is not continued by another one
_GRAM_BYTES = 4 << 30


def quantize_folder(
    model: Path,
    out: Path,
    method: FolderMethod,
    calibration: Calibration | None = None,
    *,
    text_identity: str = "",
    gram_bytes: int = _GRAM_BYTES,
    threads: int = 1,
    on_progress: Callable[[int, int], object] = lambda done, whole: None,
) -> Report:
    """Quantize the model in the folder `model`, and write it to the folder `out`.

    Without a `calibration` weights are rounded to the nearest. With one they are rounded by GPTQ; `text_identity` names
    its text, and gram matrices of `gram_bytes` are kept at once (each run of the text has as many). `on_progress` is
    told how many of the weights' bytes are done and how many there are, after each tensor. What it raises stops the
    work.

    Work that was stopped, in whatever way, goes on when it is called again with the same arguments: shards that are
    finished are kept. Each shard is read again before it counts as finished. The files are the same each time.

    Raises ModelError for a model that cannot be quantized, and for an `out` that holds something else.
    """
    config, checkpoint, choice = _open(model, out, method)
    settings = _settings(config, checkpoint, method, "" if calibration is None else text_identity)
    quantization = LAYOUTS[method].config(choice.group_size, choice.kept, {_layer(name) for name in choice.inputs})
    config["quantization_config"] = quantization
    sizes = {use: checkpoint[name].shape[1] for name, use in choice.inputs.items()}
    writer = _ShardWriter(checkpoint, choice, method, config, Gathering(calibration, sizes, gram_bytes), threads)
    done, whole = 0, sum(stored.data.nbytes for stored in checkpoint.values())

    def advance(name: str) -> None:
        nonlocal done
        done += checkpoint[name].data.nbytes
        on_progress(done, whole)

    reports: list[TensorReport] = []
    file_of: dict[str, str] = {}
    with Journal(out, settings) as journal:
        for number, names in enumerate(choice.shards, 1):
            file = f"model-{number:05}-of-{len(choice.shards):05}.safetensors"
            tensors = journal.finished(file)
            if tensors is None:
                with replacing(out / file) as part:
                    digest, tensors = writer.write(part, names, advance)
                journal.finish(file, digest, tensors)
            else:
                for name in names:
                    advance(name)
            reports += tensors
            file_of |= dict.fromkeys(open_file(out / file), file)
        for path in _other_files(model):
            copy_file(path, out / path.relative_to(model))
        report = Report(reports)
        write_json(out / _INDEX, {"metadata": {"total_size": report.num_bytes}, "weight_map": file_of})
        write_json(out / "config.json", config)
        journal.remove()
    return report


def _open(model: Path, out: Path, method: FolderMethod) -> tuple[dict[str, Any], Checkpoint, Choice]:
    """The config, the tensors, and what becomes of them. Raises ModelError for what cannot be quantized."""
    if model.is_file() or (model.is_dir() and find_gguf(model)):
        raise ModelError(f"{model} is not a Hugging Face folder: take the folder of floats that it was made from")
    config = dict(FolderSource(model).config)
    if (how := method_in_words(config)) is not None:
        raise ModelError(f"{model} is quantized already, by {how}: take the folder of floats that it was made from")
    if model.resolve() in (out.resolve(), *out.resolve().parents):
        raise ModelError(f"{out} lies in the model's own folder: name a folder outside it")
    description = describe(config)
    checkpoint, weights = open_checkpoint(model), open_weights(model, description)
    choice = choose(checkpoint, weights, method, description.head_name)
    if not choice.inputs:
        name, note = next(iter(choice.notes.items()), ("", "there are no layers"))
        raise ModelError(f"{model} has no matrix that {method} has a form for: {name or 'it'} is {note}")
    return config, checkpoint, choice


def _settings(config: Mapping[str, Any], checkpoint: Checkpoint, method: str, text: str) -> dict[str, str]:
    """What the files that are written follow from."""
    files = sorted({stored.version[:3] for stored in checkpoint.values()})
    model = json.dumps([config, [(Path(path).name, size, changed) for path, size, changed in files]], sort_keys=True)
    digest = hashlib.sha256(model.encode()).hexdigest()
    return {"version": _VERSION, "method": method, "model": digest, "calibration text": text}


class _ShardWriter:
    """Writes some of a checkpoint's tensors to a file each time, quantized if they are chosen."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        choice: Choice,
        method: FolderMethod,
        config: Mapping[str, Any],
        gathering: Gathering,
        threads: int,
    ) -> None:
        self._checkpoint, self._choice, self._layout = checkpoint, choice, LAYOUTS[method]
        self._gathering, self._threads = gathering, threads
        self._reader = layer_reader(config)

    def write(
        self, path: Path, names: Sequence[str], advance: Callable[[str], object]
    ) -> tuple[str, Sequence[TensorReport]]:
        """Write the file, and read it again. Returns its SHA-256, and what became of the tensors."""
        tensors: dict[str, FileTensor] = {}
        reports, meant = [], {}
        for name in names:
            if name in self._choice.inputs:
                parts, meant[name], report = self._quantized(name)
                tensors |= parts
            else:
                stored = self._checkpoint[name]
                tensors[name] = FileTensor(stored.dtype, stored.shape, stored.data)
                report = TensorReport(
                    name, stored.shape, stored.dtype, stored.data.nbytes, note=self._choice.notes.get(name)
                )
            reports.append(report)
            advance(name)
        digest = write_safetensors(path, tensors)
        self._verify(path, names, meant)
        return digest, reports

    def _quantized(self, name: str) -> tuple[Mapping[str, FileTensor], bytes, TensorReport]:
        """What is stored of a matrix, the digest of its numbers, and what became of it."""
        use = self._choice.inputs[name]
        stored = self._checkpoint[name].floats(name)
        require_finite([stored], self._threads)
        weight = to_float32(stored)
        statistics, hessian = self._gathering.of(use)
        grid = self._layout.grid(self._choice.group_size or weight.shape[1], stored.dtype)
        matrix = round_matrix(weight, grid, statistics, hessian, self._threads)
        tensors = {
            f"{_layer(name)}.{part}": file_tensor(array) for part, array in self._layout.tensors(matrix, grid).items()
        }
        report = TensorReport(
            name,
            (weight.shape[0], weight.shape[1]),
            f"int{grid.bits} in groups of {grid.group_size}" if self._layout.groups else f"int{grid.bits}",
            sum(tensor.data.nbytes for tensor in tensors.values()),
            matrix.error,
            "the text says nothing about its inputs" if self._gathering.has_text and statistics is None else None,
        )
        return tensors, _digest(matrix.codes, matrix.scales, matrix.zeros), report

    def _verify(self, path: Path, names: Sequence[str], meant: Mapping[str, bytes]) -> None:
        written = open_file(path)
        for name in names:
            if name in meant:
                matrix = self._reader.matrix(LayerTensors(_layer(name), written.get)) if self._reader else None
                same = matrix is not None and _digest(*_numbers(matrix.read())) == meant[name]
            else:
                same = equal_bytes(written[name].data, self._checkpoint[name].data)
            if not same:
                raise ModelError(f"{path}: {name} was not written as it was meant: check the disk, and start again")


def _numbers(tensor: WeightTensor) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """Codes, scales and zeros as a RoundedMatrix has them."""
    if not isinstance(tensor, QuantizedTensor):
        raise TypeError(f"a {type(tensor).__name__} has no codes")
    codes, middle = unpack(tensor.codes, tensor.bits, tensor.shape[1]), np.uint8(1 << (tensor.bits - 1))
    scales = to_float32(tensor.scales)
    zeros = np.full(scales.shape, middle) if tensor.zeros is None else tensor.zeros.astype(np.uint8)
    return codes ^ middle if tensor.format == "int" else codes, scales, zeros


def _digest(*arrays: NDArray[Any]) -> bytes:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.digest()


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


def _other_files(model: Path) -> Iterator[Path]:
    """What belongs to a model beside its weights and its config.json, without hidden files."""
    for path in sorted(model.rglob("*")):
        place = path.relative_to(model)
        hidden = any(part.startswith(".") for part in place.parts)
        if path.is_file() and not hidden and not place.name.endswith(_WEIGHTS) and str(place) != "config.json":
            yield path
