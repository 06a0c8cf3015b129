"""Weights: from a model's name to its folder, and from the folder to tensors under Tidewheel's names."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelError
from ..files.folder import read_config
from ..models import ModelDescription
from .checkpoint import CheckpointWeights, open_checkpoint
from .dtypes import dtype_from_config
from .dummy import DummyWeights
from .hub import resolve
from .tensor import WeightSource

__all__ = ["LOAD_FORMATS", "open_weights", "read_config", "resolve"]

LOAD_FORMATS = ("auto", "safetensors", "dummy")


def open_weights(folder: Path, description: ModelDescription, load_format: str = "auto", seed: int = 0) -> WeightSource:
    """The weights of the model in `folder`.

    `load_format` is one of LOAD_FORMATS: auto and safetensors read the folder's checkpoint, dummy makes random
    weights from `seed` and needs no weight files. Raises ModelError, naming the file and the tensor.
    """
    if load_format == "dummy":
        return DummyWeights(description.spec, dtype_from_config(read_config(folder)), seed)
    if load_format in LOAD_FORMATS:
        return CheckpointWeights(open_checkpoint(folder), description)
    raise ModelError(f"load format {load_format!r} is not known; known are {', '.join(LOAD_FORMATS)}")
