"""EAGLE3 checkpoints: a layer for drafts in a folder of its own, whose weights are read beside the model's."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import ModelError
from ..files.folder import read_config
from ..files.wording import shown
from ..models.eagle3 import Eagle3Place, describe_eagle3
from ..models.spec import DecoderSpec, Eagle3Spec
from ..models.spec.shapes import under
from .checkpoint import open_checkpoint
from .dtypes import STORAGE
from .hub import resolve
from .quantization import TensorFormat
from .stored import FLOATS, Checkpoint, StoredTensor
from .tensor import DenseTensor, WeightSource, WeightTensor

logger = logging.getLogger(__name__)

_TOKENS, _IS_DRAFTED = "d2t", "t2d"
_INTEGERS: Mapping[str, np.dtype[np.signedinteger]] = {"I64": np.dtype("<i8"), "I32": np.dtype("<i4")}
_NOT_NEEDED = ("rotary_emb.inv_freq",)


class Eagle3Layer:
    """The layer's `spec`, and its weights, whose shapes have been checked."""

    def __init__(self, spec: Eagle3Spec, tensors: Mapping[str, tuple[StoredTensor, Eagle3Place]]) -> None:
        self.spec = spec
        self._tensors = tensors

    def beside(self, weights: WeightSource) -> WeightSource:
        """The weights of the model and of the layer."""
        return _Both(weights, self._tensors)


class _Both:
    """A WeightSource of a model's weights and its layer's."""

    def __init__(self, model: WeightSource, layer: Mapping[str, tuple[StoredTensor, Eagle3Place]]) -> None:
        self._model, self._layer = model, layer
        self.dtype = model.dtype
        places = [(name, stored.place, place.columns) for name, (stored, place) in layer.items()]
        self.identity = None if model.identity is None else json.dumps([model.identity, places])

    def __getitem__(self, name: str) -> WeightTensor:
        if name not in self._layer:
            return self._model[name]
        stored, place = self._layer[name]
        dtype = FLOATS[stored.dtype]
        whole, mapped = stored.array(STORAGE[dtype].newbyteorder("<"))
        data = whole if place.columns is None else whole[:, slice(*place.columns)]
        return DenseTensor(data, dtype, mapped, f"{stored.path}: tensor {place.name}")

    def stored_format(self, name: str) -> TensorFormat | None:
        return None if name in self._layer else self._model.stored_format(name)

    def __iter__(self) -> Iterator[str]:
        yield from self._model
        yield from self._layer


def open_eagle3(model: str, revision: str | None, download_dir: str | Path | None, target: DecoderSpec) -> Eagle3Layer:
    """The layer in a folder or of a hub id, for the model `target`.

    Raises ModelError if there is none, if its kind is not supported, or if it was made for another model.
    """
    folder = resolve(model, revision, download_dir)
    if not folder.is_dir():
        raise ModelError(f"--speculative-config: {model} is a file; an EAGLE3 layer is read from a folder")
    checkpoint = {name.removeprefix("model."): stored for name, stored in open_checkpoint(folder).items()}
    try:
        description = describe_eagle3(read_config(folder), target, checkpoint.keys())
    except ModelError as error:
        raise ModelError(f"--speculative-config: {model}: {error}") from error
    spec = replace(description.spec, token_ids=_token_ids(checkpoint, description.spec, target.vocab_size, folder))
    shapes = under("eagle3", spec.shapes(target.hidden_size, target.vocab_size))
    tensors = {
        name: (_checked(checkpoint, place, shapes[name], folder, len(spec.layers)), place)
        for name, place in description.places.items()
    }
    used = {place.name for place in description.places.values()} | {_TOKENS, _IS_DRAFTED}
    if others := sorted(name for name in checkpoint.keys() - used if not name.endswith(_NOT_NEEDED)):
        logger.warning("%s: %s are not loaded, because they are not used", model, ", ".join(map(shown, others[:5])))
    return Eagle3Layer(spec, tensors)


def _checked(
    checkpoint: Checkpoint, place: Eagle3Place, shape: tuple[int, ...], folder: Path, num_parts: int
) -> StoredTensor:
    stored = checkpoint.get(place.name)
    if stored is None:
        raise ModelError(f"{folder}: tensor {place.name} is missing")
    if stored.dtype not in FLOATS:
        raise ModelError(
            f"{stored.path}: tensor {place.name} is stored as {stored.dtype}; supported are {', '.join(FLOATS)}"
        )
    wanted = shape if place.columns is None else (shape[0], num_parts * shape[1])
    if stored.shape != wanted:
        raise ModelError(
            f"{stored.path}: tensor {place.name} has shape {stored.shape}, but config.json requires {wanted}"
        )
    return stored


def _token_ids(checkpoint: Checkpoint, spec: Eagle3Spec, vocab_size: int, folder: Path) -> tuple[int, ...] | None:
    """For each of the layer's tokens, its id in the model's vocabulary; None if both are the same."""
    stored = checkpoint.get(_TOKENS)
    if stored is None:
        if spec.vocab_size != vocab_size:
            raise ModelError(f"{folder}: tensor {_TOKENS} is missing, which says what its {spec.vocab_size} tokens are")
        return None
    if stored.dtype not in _INTEGERS or stored.shape != (spec.vocab_size,):
        raise ModelError(f"{stored.path}: tensor {_TOKENS} must be {spec.vocab_size} integers of 32 or 64 bits")
    further = stored.array(_INTEGERS[stored.dtype])[0].astype(np.int64)
    ids = np.arange(spec.vocab_size) + further
    if ((ids < 0) | (ids >= vocab_size)).any():
        raise ModelError(f"{stored.path}: tensor {_TOKENS} names tokens that the model does not have")
    return None if spec.vocab_size == vocab_size and not further.any() else tuple(ids.tolist())
